"""Text that goes in: any UTF-8 is kept exactly, control tokens come from the renderer only, conversations become the
tokens that harmony writes; and sampled tokens become messages, whatever the model wrote."""
import json
import random
import subprocess
import tarfile
import time
import zlib

from helpers import (CHECKED, CONVERSATIONS, GOLDENS, PARROT, PLAIN, conversation, data, each, expect, ids_of, infer,
                     patience, read_json, refused, render, same, start, write_json)

CASES = read_json(GOLDENS / "harmony_cases.json")
ADDED = {t["content"]: t["id"] for t in read_json(PARROT / "tokenizer.json")["added_tokens"]}
ALL_NAMES = "".join(ADDED)


def tokenize(text, model=PARROT, *options, **how):
    return ids_of(infer("tokenize", model, *options, stdin=text, **how))


def detokenize(ids, model=PARROT, **how):
    return infer("detokenize", model, stdin=json.dumps(ids), **how).out


def parse(ids, model=PARROT, **how):
    """The messages, and what was said on stderr."""
    r = infer("parse", model, stdin=json.dumps(ids), **how)
    try:
        return [json.loads(line) for line in r.out.decode().split("\n")[:-1]], r.err
    except ValueError as e:
        raise AssertionError(f"not lines of JSON in UTF-8: {e}") from None


# ---- text to tokens and back

def test_a_megabyte_of_one_character():
    """Promised: 0.5 s. The limit is ten times that."""
    model = data("gpt-oss-20b")

    def check(name, unit):
        text = unit * ((1 << 20) // len(unit.encode()))
        r = infer("tokenize", model, stdin=text, program=PLAIN, cpu=5)
        if name == "x":
            expect(detokenize(ids_of(r), model, program=PLAIN).decode() == text, "comes back as another text")
    each([("x", "x"), ("space", " "), ("underscore", "_"), ("CJK", "漢"), ("combining marks", "\u0301"),
          ("newline", "\n"), ("digit", "1"), ("capital", "A"), ("emoji", "😀"), ("control text", "<|end|>"),
          ("NUL", "\0")], check)


def test_a_megabyte_as_prompt():
    r = infer("play", PARROT, stdin="x" * (1 << 20), program=PLAIN, code=4, cpu=5)
    expect("--ctx" in r.err and "4096" in r.err.replace(",", ""), f"stderr: {r.err!r}")


INVALID = [  # what, the bytes, the offset of the first that is wrong
    ("an overlong NUL", b"ab\xc0\x80c", 2), ("a surrogate", b"\xed\xa0\x80", 0),
    ("above U+10FFFF", b"a\xf4\x90\x80\x80", 1),
    ("a lone continuation", b"abc\x80", 3), ("0xFF", b"\xff", 0), ("cut at the end", "é€".encode() + b"\xe2\x82", 5),
    ("cut in the middle", b"0123456789\xf0\x9f\x98 x", 10), ("overlong by one", b"\xe0\x80\xaf", 0),
    ("five bytes", b"x\xf8\x88\x80\x80\x80", 1)]


def test_invalid_utf8_is_refused_with_its_offset(folder):
    def check(name, text, offset):
        (folder / "prompt").write_bytes(text)
        words = [f"byte {offset}"]
        refused("play", PARROT, "-p", text, code=2, words=["--prompt", *words])
        refused("play", PARROT, "-f", folder / "prompt", code=2, words=words)
        refused("play", PARROT, stdin=text, code=2, words=words)
        refused("play", PARROT, "-p", "x", "-s", text, code=2, words=words)
        refused("play", PARROT, "-p", "x", "--stop", text, code=2, words=["--stop", *words])
        refused("tokenize", PARROT, stdin=text, code=2, words=words)
        refused("tokenize", PARROT, "--jsonl", stdin=b'"' + text + b'"', code=2, words=[f"byte {offset + 1}"])
        before = b'{"messages": [{"role": "user", "content": "'
        refused("render", PARROT, stdin=before + text + b'"}]}', code=2, words=[f"byte {offset + len(before)}"])
    each(INVALID, check)


def random_texts(n, seed=7):
    """Valid UTF-8 from all planes, mixed with ASCII, white space, controls and names of control tokens."""
    rng = random.Random(seed)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xd800), (0xe000, 0x10000)]
    planes += [(p << 16, p + 1 << 16) for p in range(1, 17)]
    parts = [*ADDED, "<|", "|>", " ", "\n", "\r\n", "\u200d", "\u0301", "'s", "0", "\x7f", "\x1b[0m", "\ufeff"]
    for _ in range(n):
        yield "".join(rng.choice(parts) if rng.random() < 0.3 else chr(rng.randrange(*rng.choice(planes)))
                      for _ in range(rng.randint(0, 60)))


def comes_back(model, program):
    everything = "".join(chr(c) for c in range(0x110000) if not 0xd800 <= c < 0xe000)
    ids = tokenize(everything, model, program=program)
    same(detokenize(ids, model, program=program).decode(), everything, "every code point in turn")
    texts = [t.replace("\0", " ") for t in random_texts(500)]  # a line of --jsonl holds no U+0000
    lines = infer("tokenize", model, "--jsonl", stdin="\n".join(json.dumps(t) for t in texts), program=program).text
    rows = [json.loads(line) for line in lines.splitlines()]
    same(len(rows), len(texts), "number of lines")
    same(detokenize([i for row in rows for i in row], model, program=program).decode(), "".join(texts), "random texts")
    same(count_control(sum(rows, []), model), 0, "number of control tokens")
    same((tokenize("", model, program=program), detokenize([], model, program=program)), ([], b""), "nothing")


def test_a_wrong_line_is_refused_alone():
    """The other lines of --jsonl go on, `null` stands for it, and the exit code is 2."""
    bad = ['"a\\u0000b"', '"\udcff"', "{}", "x", '"two" "texts"', ""]
    lines = [line for text in bad for line in (text, '"fine"')]
    r = infer("tokenize", PARROT, "--jsonl", stdin="\n".join(lines).encode(errors="surrogateescape"), code=2)
    same(r.text.splitlines(), ["null", json.dumps(tokenize("fine"), separators=(",", ":"))] * len(bad), "stdout")
    same([line.split(":")[1].strip() for line in r.err.splitlines()], [f"stdin, line {2 * i + 1}" for i in range(len(bad))],
         "the lines that are named")


def test_endless_stdin():
    """It is refused before it fills the memory."""
    with open("/dev/zero", "rb") as zeros:
        for command in (["tokenize", PARROT], ["play", PARROT, "-p", "x"]):
            p = start(*command, stdin=zeros, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, program=PLAIN)
            same((p.communicate(timeout=patience(60))[1], p.returncode),
                 (b"infer: stdin has more than the 268 MB that are allowed\n", 2), command[0])


def test_ids_outside_the_vocabulary():
    refused("detokenize", PARROT, stdin="[1, 99999999]", code=2, words=["99999999", "vocabulary"])
    refused("detokenize", PARROT, stdin="[1, -1]", code=2, words=["'-1'"])
    refused("detokenize", PARROT, stdin="[1, x]", code=2, words=["'x'"])
    for command in ("detokenize", "parse"):
        refused(command, PARROT, stdin=b"[1, 2\0, 99999999]", code=2, words=["NUL"])


def test_decode_of_encode_is_the_text():
    comes_back(PARROT, CHECKED)


def test_decode_of_encode_is_the_text_published():
    comes_back(data("gpt-oss-20b"), PLAIN)


def check_strings(file, model):
    rows = [json.loads(line) for line in (GOLDENS / file).read_text().split("\n") if line]
    plain = "\n".join(json.dumps(r["text"]) for r in rows) + "\n"
    raw = "\n".join(json.dumps(r["text"], ensure_ascii=False) for r in rows)  # without escapes, and without a last \n
    special = [[1] * ("template_ids" in rows[0]) + r.get("control_ids", r["ids"]) for r in rows]

    def check(name, options, text, expected):
        lines = infer("tokenize", model, "--jsonl", *options, stdin=text).text.splitlines()
        same(len(lines), len(rows), "number of lines")
        wrong = [(r["text"], json.loads(line), e) for r, line, e in zip(rows, lines, expected) if json.loads(line) != e]
        expect(not wrong, f"{len(wrong)} of {len(rows)} strings, first (text, ids, expected): {wrong[:1]}")
    each([("as text", [], plain, [r["ids"] for r in rows]), ("as raw text", [], raw, [r["ids"] for r in rows]),
          ("with control tokens and template", ["--special"], plain, special)], check)


def test_ids_of_strings_gpt_oss():
    check_strings("tokenizer_strings.jsonl", data("gpt-oss-20b"))


def test_ids_of_prompts_gpt_oss():
    """Seven whole prompts, control tokens and all."""
    prompts = read_json(GOLDENS / "greedy.json")["prompts"]
    lines = infer("tokenize", data("gpt-oss-20b"), "--jsonl", "--special", program=PLAIN,
                  stdin="\n".join(json.dumps(p["text"]) for p in prompts)).text.splitlines()
    each([(p["name"], p, line) for p, line in zip(prompts, lines)],
         lambda name, p, line: same(json.loads(line), p["ids"], "ids"))


def check_llama_strings(name):
    check_strings(f"tokenizer_strings_{name}.jsonl", data("models/" + name))


def test_ids_of_strings_tinystories():
    check_llama_strings("TinyStories-656K")


def test_ids_of_strings_stories260K():
    check_llama_strings("stories260K")


def test_ids_of_strings_families(folder):
    """The published tokenizers of ten families, by checksums."""
    rows = [json.loads(line) for line in (GOLDENS / "tokenizer_strings_families.jsonl").read_text().split("\n") if line]
    texts = "\n".join(json.dumps(r["text"]) for r in rows)
    with tarfile.open(data("families.tar.xz")) as tar:
        for member in tar:
            if member.name.endswith("/tokenizer.json"):
                (folder / member.name.split("/")[1]).mkdir()
                (folder / member.name.split("/")[1] / "tokenizer.json").write_bytes(tar.extractfile(member).read())

    def check(family):
        for key, options in (("text_ids", []), ("ids", ["--special"])):
            lines = infer("tokenize", folder / family, "--jsonl", *options, stdin=texts, program=PLAIN).text.splitlines()
            sums = [zlib.crc32(json.dumps(json.loads(line)).encode()) for line in lines]
            same(len(sums), len(rows), "number of lines")
            wrong = [r["text"] for r, found in zip(rows, sums) if r[key][family] != found]
            expect(not wrong, f"{key}: {len(wrong)} of {len(rows)} strings, first {wrong[:3]}")
    each([(family,) for family in rows[0]["ids"]], check)


def test_ids_with_a_template(folder):
    """Tokens before the text, behind it, and both; under other names, and such as are no added tokens."""
    tokenizer = read_json(PARROT / "tokenizer.json")

    def check(name, post_processor, ids):
        write_json(folder / "tokenizer.json", tokenizer | {"post_processor": post_processor})
        for text, expected in ids.items():
            same(tokenize(text, folder, "--special"), expected, repr(text))
            same(tokenize(text, folder), tokenize(text), f"{text!r} without the template")
    each([tuple(row.values()) for row in read_json(GOLDENS / "templates.json")], check)


# ---- conversations to tokens

def as_chat(case):
    """A case of harmony's tests in the shape that `render` takes."""
    chat = {"messages": [], "bare": True, "keep_analysis": case["config"].get("auto_drop_analysis") is False,
            "add_generation_prompt": case["completion_role"] is not None}
    for m in case["messages"]:
        if m["role"] == "system":
            s = m["system"]
            chat.update(bare=False, date=s.get("conversation_start_date", "none"), channels=", ".join(s["channels"]),
                        **{k: s[k] for k in ("model_identity", "knowledge_cutoff", "reasoning_effort")})
        elif m["role"] == "developer":
            d = m["developer"]
            if "instructions" in d:
                chat["messages"].append({"role": "system", "content": d["instructions"]})
            chat["tools"] = [{"type": "function", "function": f} for f in d.get("functions", [])]
        else:
            chat["messages"].append(m)
    return chat


NOT_RENDERED = {  # cases of harmony's tests that are left out, and why
    "test_browser_tool_only": "the built-in browser is not offered",
    "test_browser_and_function_tool": "the built-in browser is not offered",
    "test_browser_and_python_tool": "the built-in browser and python are not offered"}


def check_rendered(chat, text, ids, model=PARROT, program=CHECKED):
    if render(chat, model, program) != ids:  # say where
        same(infer("render", model, stdin=json.dumps(chat), program=program).text, text, "text")
        same(render(chat, model, program), ids, "ids")


def test_harmony_rendered():
    model = data("gpt-oss-20b")
    cases = [(c["name"], c) for c in CASES["render"] if c["name"] not in NOT_RENDERED]
    same(len(cases), 16, "number of cases")

    def check(name, case):
        text, ids = case["text"], case["ids"]
        if name == "test_does_not_drop_if_ongoing_analysis":  # calls are written as the published template does
            first, behind = (f"assistant{a}<|channel|>commentary{b} <|constrain|>json" for a, b in
                             ((" to=functions.lookup_weather", ""), ("", " to=functions.lookup_weather")))
            expect(first in text, "the test is wrong")
            text = text.replace(first, behind)
            ids = tokenize(text, model, "--special", program=PLAIN)
        check_rendered(as_chat(case), text, ids, model, PLAIN)
    each(cases, check)


def test_conversations_rendered():
    """Every turn of every conversation, with tool calls, their results, and all the reasoning, which is dropped from
    the second and the third turn on and kept where a result is awaited."""
    def check(name, i):
        turn = CONVERSATIONS[name]["turns"][i]
        check_rendered(conversation(name, i), turn["prompt"], turn["prompt_ids"])
    each([(name, i) for name, c in CONVERSATIONS.items() for i in range(len(c["turns"]))], check)


SYSTEM = ("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
          "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n"
          "# Valid channels: analysis, commentary, final. Channel must be included for every message.")
TOOLS = SYSTEM + "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
PLAIN_SYSTEM = SYSTEM + "<|end|>"
USER, END = "<|start|>user<|message|>Hi<|end|>", "<|start|>assistant"
HI = {"role": "user", "content": "Hi"}
DEVELOPER = "<|start|>developer<|message|>"
SCHEMA = {"type": "object", "properties": {"items": {"type": "array", "items": {"type": "string"}}}}
COMPACT = '{"type":"object","properties":{"items":{"type":"array","items":{"type":"string"}}}}'


def function(name="f", description=None, **parameters):
    made = {"name": name, **({"description": description} if description else {})}
    return {"type": "function", "function": {**made, **({"parameters": parameters} if parameters else {})}}


def format_of(**fields):
    return {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA, **fields}}


def called(*names, content=None, reasoning=None):
    """An assistant's message that calls functions; the ids are the names in capitals."""
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [
        {"id": name.upper(), "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]}


def call_text(name):
    return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"


def result(name, text, **fields):
    return {"role": "tool", "tool_call_id": name.upper(), "content": text, **fields}


def result_text(name, text):
    return f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>"


def said(channel, text):
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"


NAMESPACE = "# Tools\n\n## functions\n\nnamespace functions {\n\n%s\n\n} // namespace functions"
FINAL = {"role": "assistant", "content": "Yo"}
RULES = [  # what, fields besides "messages" and the messages, the text of the prompt
    ("no date", {}, [HI], PLAIN_SYSTEM + USER + END),
    ("a date", {"date": "2025-06-28"}, [HI],
     PLAIN_SYSTEM.replace("\n\nR", "\nCurrent date: 2025-06-28\n\nR", 1) + USER + END),
    ("low effort", {"reasoning_effort": "low"}, [HI], PLAIN_SYSTEM.replace("medium", "low") + USER + END),
    ("no generation prompt", {"add_generation_prompt": False}, [HI], PLAIN_SYSTEM + USER),
    ("an empty system prompt says nothing", {}, [{"role": "system", "content": ""}, HI], PLAIN_SYSTEM + USER + END),
    ("text in parts", {}, [{"role": "user", "content": [{"type": "text", "text": c} for c in ("H", "", "i")]}],
     PLAIN_SYSTEM + USER.replace("Hi", "H\n\ni") + END),
    ("system and developer are instructions", {}, [{"role": "developer", "content": "Be brief."}, HI],
     PLAIN_SYSTEM + DEVELOPER + "# Instructions\n\nBe brief.<|end|>" + USER + END),
    ("a response format", {"response_format": format_of(description="What to buy")}, [HI],
     PLAIN_SYSTEM + DEVELOPER + f"# Response Formats\n\n## list\n\n// What to buy\n{COMPACT}<|end|>" + USER + END),
    ("a response format at the end", {"response_format": format_of(), "tools": [function()]},
     [{"role": "system", "content": "Be brief."}, HI],
     TOOLS + DEVELOPER + "# Instructions\n\nBe brief.\n\n" + NAMESPACE % "type f = () => any;" +
     f"\n\n# Response Formats\n\n## list\n\n{COMPACT}<|end|>" + USER + END),
    ("response format text", {"response_format": {"type": "text"}}, [HI], PLAIN_SYSTEM + USER + END),
    ("types", {"tools": [function(description="Does it.", type="object", required=["list"], properties={
        "n": {"type": "integer", "description": "how many"}, "list": {"type": "array", "items": {"type": "integer"}},
        "what": {}, "flag": {"type": "boolean", "default": True}, "x": {"type": "number", "nullable": True}})]}, [HI],
     TOOLS + DEVELOPER + NAMESPACE % (
         "// Does it.\ntype f = (_: {\n// how many\nn?: number,\nlist: number[],\nwhat?: any,\n"
         "flag?: boolean, // default: true\nx?: number | null,\n}) => any;")
     + "<|end|>" + USER + END),
    ("what may be null", {"tools": [function(type="object", nullable=True, properties={
        "a": {"type": "array", "items": {"type": "string", "nullable": True}, "nullable": True},
        "b": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "nullable": True}},
        "c": {"oneOf": [{"type": "string", "nullable": True}, {"type": "number"}], "nullable": True}})]}, [HI],
     TOOLS + DEVELOPER + NAMESPACE % (
         "type f = (_: {\na?: string[] | null,\nb?: number[][],\nc?:\n | string | null\n | number\n,\n}) => any;")
     + "<|end|>" + USER + END),
    ("numbers as they were written", {"tools": [function(type="object", properties={
        "n": {"default": 9007199254740991}, "x": {"default": 1.0}, "l": {"default": [-1e-7, "2.50\\", 1234567890123456789]}})]},
     [HI], TOOLS + DEVELOPER + NAMESPACE % (
         "type f = (_: {\nn?: any, // default: 9007199254740991\nx?: any, // default: 1.0\n"
         'l?: any, // default: [-1e-07,"2.50\\\\",1234567890123456789]\n}) => any;') + "<|end|>" + USER + END),
    ("lines of descriptions", {"tools": [function(description="A\nB", type="object", properties={
        "n": {"description": "C\n D\n", "type": "object", "properties": {"x": {"description": "E\r\nF"}}}})]}, [HI],
     TOOLS + DEVELOPER + NAMESPACE % (
         "// A\n// B\ntype f = (_: {\n// C\n D\n\nn?:     // C\n D\n\n{\n    // E\r\nF\n    x?: any,\n    },\n}) => any;")
     + "<|end|>" + USER + END),
    ("a call without result", {}, [HI, called("f", reasoning="I call.")],
     PLAIN_SYSTEM + USER + said("analysis", "I call.") + call_text("f") + END),
    ("reasoning while a result is awaited", {}, [HI, called("f", reasoning="I call."), result("f", "1")],
     PLAIN_SYSTEM + USER + said("analysis", "I call.") + call_text("f") + result_text("f", "1") + END),
    ("reasoning by the name of the published template", {},
     [HI, {"role": "assistant", "thinking": "I call."}, called("f"), result("f", "1")],
     PLAIN_SYSTEM + USER + said("analysis", "I call.") + call_text("f") + result_text("f", "1") + END),
    ("reasoning of two calls in one turn", {},
     [HI, called("f", reasoning="One."), result("f", "1"), called("g", reasoning="Two."), result("g", "2")],
     PLAIN_SYSTEM + USER + said("analysis", "One.") + call_text("f") + result_text("f", "1") + said("analysis", "Two.")
     + call_text("g") + result_text("g", "2") + END),
    ("reasoning of a turn with calls that has ended", {},
     [HI, called("f", reasoning="One."), result("f", "1"), {**FINAL, "reasoning_content": "Two."}, HI],
     PLAIN_SYSTEM + USER + call_text("f") + result_text("f", "1") + said("final", "Yo") + USER + END),
    ("reasoning of the turn that waits, after one that has ended", {},
     [HI, {**FINAL, "thinking": "Zero."}, HI, called("f", reasoning="One."), result("f", "1")],
     PLAIN_SYSTEM + USER + said("final", "Yo") + USER + said("analysis", "One.") + call_text("f")
     + result_text("f", "1") + END),
    ("reasoning in the second and third turn", {},
     [HI, {**FINAL, "reasoning_content": "A"}, HI, {**FINAL, "reasoning_content": "B"}, HI,
      {**FINAL, "reasoning_content": "C"}, HI],
     PLAIN_SYSTEM + 3 * (USER + said("final", "Yo")) + USER + END),
    ("visible commentary is kept", {},
     [HI, {"role": "assistant", "channel": "commentary", "content": "I look."}, FINAL, HI],
     PLAIN_SYSTEM + USER + said("commentary", "I look.") + said("final", "Yo") + USER + END),
    ("text beside a call is commentary", {}, [HI, called("f", content="I look.")],
     PLAIN_SYSTEM + USER + said("commentary", "I look.") + call_text("f") + END),
    ("results by id, not by order", {}, [HI, called("f", "g"), result("g", "2"), result("f", "1")],
     PLAIN_SYSTEM + USER + call_text("f") + call_text("g") + result_text("g", "2") + result_text("f", "1") + END),
    ("an empty answer without thoughts", {}, [HI, {"role": "assistant", "content": "", "reasoning_content": ""}, HI],
     PLAIN_SYSTEM + USER + said("final", "") + USER + END),
    ("a thought that a limit cut", {}, [HI, {"role": "assistant", "content": "", "reasoning_content": "Why"}, HI],
     PLAIN_SYSTEM + USER + said("final", "") + USER + END),
    ("<|return|> as text of an answer", {}, [HI, {"role": "assistant", "content": "Yo<|return|>"}, HI],
     PLAIN_SYSTEM + USER + said("final", "Yo<|return|>") + USER + END),
]


def test_rules_of_harmony():
    def check(name, fields, messages, text):
        chat = json.dumps({"date": "none", **fields, "messages": messages})
        same(infer("render", PARROT, stdin=chat).text, text, "text")
        ids = ids_of(infer("render", PARROT, "--ids", stdin=chat))
        expect(ADDED["<|return|>"] not in ids, "<|return|> is in a prompt")
        if "<|return|>" not in text:
            same(ids, tokenize(text, PARROT, "--special"), "ids")
    each(RULES, check)


def test_default_date_is_today():
    before = time.strftime("%Y-%m-%d")
    text = infer("render", PARROT, stdin=json.dumps({"messages": [HI]})).text
    expect(f"Current date: {before}\n" in text or f"Current date: {time.strftime('%Y-%m-%d')}\n" in text, text[:200])


def test_what_clients_leave_out():
    """A call's arguments may be empty, null or missing. A refusal is what the assistant said."""
    def call(**arguments):
        return {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "A", "function": {"name": "f", **arguments}}]}]}

    def said(**message):
        return {"messages": [HI, {"role": "assistant", **message}, HI]}
    refusal, text = ({"type": kind, kind: "I cannot."} for kind in ("refusal", "text"))
    each([("empty arguments", call(arguments=""), call(arguments="{}")),
          ("null for arguments", call(arguments=None), call(arguments="{}")),
          ("no arguments", call(), call(arguments="{}")),
          ("a part", said(content=[refusal]), said(content="I cannot.")),
          ("two parts", said(content=[text, refusal]), said(content="I cannot.\nI cannot.")),
          ("a key", said(content=None, refusal="I cannot."), said(content="I cannot.")),
          ("null", said(content="I cannot.", refusal=None), said(content="I cannot."))],
         lambda name, given, expected: same(render(given), render(expected), "ids"))


WRONG = [  # what, the conversation, words of the message
    ("no JSON", "{", ["JSON"]), ("nothing", "", ["JSON"]), ("an array", "[]", ["messages"]),
    ("no messages", {}, ["messages"]), ("messages are a text", {"messages": "Hi"}, ["messages"]),
    ("a message is a text", {"messages": ["Hi"]}, ["messages[0]"]),
    ("no role", {"messages": [{"content": "Hi"}]}, ["messages[0]", "role"]),
    ("unknown role", {"messages": [HI, {"role": "king", "content": "Hi"}]}, ["messages[1]", "king"]),
    ("content is a number", {"messages": [{"role": "user", "content": 1}]}, ["messages[0].content"]),
    ("an image", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     ["messages[0].content"]),
    ("a user's refusal", {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}]},
     ["messages[0].content"]),
    ("a refusal without text", {"messages": [HI, {"role": "assistant", "content": [{"type": "refusal"}]}]},
     ["messages[1].content"]),
    ("a result without a call", {"messages": [HI, {"role": "tool", "content": "1"}]}, ["messages[1]"]),
    ("a result of another call", {"messages": [HI, called("f"), result("g", "1")]}, ["messages[2]", "tool_call_id G"]),
    ("a call without a name", {"messages": [HI, {"role": "assistant", "tool_calls": [
        {"function": {"arguments": ""}}]}]}, ["messages[1].tool_calls"]),
    ("arguments that are an object", {"messages": [HI, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": {}}}]}]}, ["messages[1].tool_calls"]),
    ("unknown effort", {"messages": [HI], "reasoning_effort": "huge"}, ["reasoning_effort", "huge"]),
    ("two efforts", {"messages": [HI], "reasoning_effort": "low medium"}, ["reasoning_effort", "low medium"]),
    ("channels are an array", {"messages": [HI], "channels": ["final"]}, ["channels"]),
    ("date is a number", {"messages": [HI], "date": 2025}, ["date"]),
    ("tools are a text", {"messages": [HI], "tools": "f"}, ["tools"]),
    ("a tool without a name", {"messages": [HI], "tools": [{"type": "function", "function": {}}]}, ["tool"]),
    ("unknown response format", {"messages": [HI], "response_format": {"type": "xml"}}, ["response_format"]),
    ("a user without content", {"messages": [{"role": "user"}]}, ["messages[0].content"]),
    ("a key twice", '{"messages": [], "messages": []}', ["messages", "twice"])]


def test_wrong_conversations_are_refused():
    def check(name, chat, words):
        refused("render", PARROT, stdin=chat if isinstance(chat, str) else json.dumps(chat), code=2, words=words)
    each(WRONG, check)


# ---- text never becomes control tokens

REFUSED = None
CALLS = [HI, called("f", reasoning="I call."), result("f", "1")]


def say(*messages, **fields):
    return {"date": "none", "messages": list(messages), **fields}


def tool(**changes):
    return say(HI, tools=[function(**{"type": "object", "properties": {"a": {"type": "string", **changes}}})])


def header(**fields):
    return say(HI, {"role": "assistant", "channel": "commentary", "recipient": "functions.f", "content_type": "json",
                    "content": "{}", **fields})


FIELDS = [  # field, conversation with a text there, control tokens that the renderer writes: 3 a message, 1 a channel,
            # 1 a constraint, 1 for the end of the prompt; REFUSED: exit code 2
    ("user", lambda x: say({"role": "user", "content": x}), 7),
    ("user in parts", lambda x: say({"role": "user", "content": [{"type": "text", "text": x}] * 2}), 7),
    ("system prompt", lambda x: say({"role": "system", "content": x}, HI), 10),
    ("two system prompts",
     lambda x: say({"role": "system", "content": x[:-3]}, {"role": "system", "content": x[-3:]}, HI), 10),
    ("developer later", lambda x: say(HI, {"role": "developer", "content": x}), 10),
    ("answer", lambda x: say(HI, {"role": "assistant", "content": x}, HI), 14),
    ("reasoning", lambda x: say(HI, called("f", reasoning=x), result("f", "1")), 20),
    ("commentary", lambda x: say(HI, {"role": "assistant", "channel": "commentary", "content": x}), 11),
    ("arguments", lambda x: say(HI, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": x}}]}), 12),
    ("tool result", lambda x: say(HI, called("f"), result("f", x)), 16),
    ("called function", lambda x: say(HI, called(x)), REFUSED),
    ("function name", lambda x: say(HI, tools=[function(name=x)]), REFUSED),
    ("function description", lambda x: say(HI, tools=[function(description=x)]), 10),
    ("parameter name", lambda x: say(HI, tools=[function(type="object", properties={x: {"type": "string"}})]), 10),
    ("parameter description", lambda x: tool(description=x), 10),
    ("parameter title", lambda x: tool(title=x), 10),
    ("parameter default", lambda x: tool(default=x), 10),
    ("parameter example", lambda x: tool(examples=[x]), 10),
    ("parameter enum", lambda x: tool(enum=["a", x]), 10),
    ("parameter type", lambda x: tool(type=["string", x]), 10),
    ("parameter alternative", lambda x: tool(type=None, oneOf=[{"type": "string", "description": x}]), 10),
    ("response format name", lambda x: say(HI, response_format=format_of(name=x)), 10),
    ("response format description", lambda x: say(HI, response_format=format_of(description=x)), 10),
    ("response format schema", lambda x: say(HI, response_format=format_of(schema={x: x})), 10),
    ("identity", lambda x: say(HI, model_identity=x), 7),
    ("knowledge cutoff", lambda x: say(HI, knowledge_cutoff=x), 7),
    ("date", lambda x: say(HI, date=x), 7),
    ("channels", lambda x: say(HI, channels=x), 7),
    ("role", lambda x: say({"role": x, "content": "Hi"}), REFUSED),
    ("effort", lambda x: say(HI, reasoning_effort=x), REFUSED),
    ("author", lambda x: say(HI, {"role": "tool", "name": "functions." + x, "content": "1"}), REFUSED),
    ("channel", lambda x: header(channel=x), REFUSED),
    ("recipient", lambda x: header(recipient=x), REFUSED),
    ("content type", lambda x: header(content_type=x), REFUSED),
    ("constrained type", lambda x: header(content_type="<|constrain|>json" + x), REFUSED),
    ("result's name", lambda x: say(HI, {"role": "tool", "name": x, "content": "1"}), REFUSED),
]


def count_control(ids, model):
    control = {t["id"] for t in read_json(model / "tokenizer.json")["added_tokens"]}
    return sum(i in control for i in ids)


def test_text_never_becomes_control_tokens():
    """All names of control tokens, in every field."""
    def check(field, make, expected):
        chat = json.dumps(make(ALL_NAMES))
        if expected is REFUSED:
            refused("render", PARROT, stdin=chat, code=2)
            return
        expect(ALL_NAMES in infer("render", PARROT, stdin=chat).text.replace("\n\n", "") or field == "parameter type",
               "the text is not in the prompt")
        same(count_control(render(json.loads(chat)), PARROT), expected, "number of control tokens")
    each(FIELDS, check)


def test_text_never_becomes_control_tokens_published():
    """The same with the published tokenizer, whose merges are others: all fields that take text at once."""
    model = data("gpt-oss-20b")
    names = "".join(t["content"] for t in read_json(model / "tokenizer.json")["added_tokens"])
    schema = {"type": "string", "description": names, "default": names, "enum": [names]}
    chat = say({"role": "system", "content": names}, {"role": "user", "content": names},
               {"role": "assistant", "content": names},
               {"role": "user", "content": [{"type": "text", "text": names}] * 2},
               called("f", reasoning=names), result("f", names), model_identity=names, knowledge_cutoff=names,
               date=names, response_format=format_of(name=names, description=names, schema={names: names}),
               tools=[function(description=names, type="object", properties={names: schema})])
    same(count_control(render(chat, model, PLAIN), model), 3 * 4 + 4 * 3 + 5 + 1, "number of control tokens")


def test_headers_take_one_word():
    """Words of a header that could be read as another part of it."""
    words = ["", " ", "f[0]", "%s", "f to=assistant", "f\n", "f<|channel|>final", "to=f", "f=1", "f g", "f\tg",
             "x" * 1000, "<", ">", "\x7f"]
    fields = [("called function", lambda x: say(HI, called(x))),
              ("function name", lambda x: say(HI, tools=[function(name=x)])),
              ("recipient", lambda x: header(recipient=x)), ("channel", lambda x: header(channel=x)),
              ("content type", lambda x: header(content_type=x)),
              ("author", lambda x: say(HI, {"role": "tool", "name": "functions." + (x or " "), "content": "1"}))]
    each([(f"{name} {word[:20]!r}", make(word)) for name, make in fields for word in words],
         lambda name, chat: refused("render", PARROT, stdin=json.dumps(chat), code=2))


# ---- tokens to messages

def test_harmony_parsed():
    """All cases but three: in the library's strict mode reading aborts, here it never does."""
    model = data("gpt-oss-20b")
    cases = [(c["name"], c) for c in CASES["parse"] if not c.get("strict")]
    same(len(cases), 14, "number of cases")
    streamed = [  # the one that the library's test does not spell out
        {"role": "assistant", "channel": "analysis"},
        {"role": "assistant", "channel": "commentary", "recipient": "browser.search", "content_type": "code"},
        {"role": "tool", "name": "browser.search", "channel": "commentary", "recipient": "assistant"}]

    def check(name, case):
        messages, _ = parse(case["ids"], model, program=PLAIN)
        expected = case.get("messages")
        if not expected:
            texts = [part.split("<|")[0] for part in case["text"].split("<|message|>")[1:]]
            expected = [{**m, "content": text} for m, text in zip(streamed, texts)]
        same(messages, expected, "messages")
    each(cases, check)


def message(content, channel=None, **fields):
    return {"role": "assistant", **({"channel": channel} if channel else {}), **fields, "content": content}


def completed(turn):
    """The messages of a turn of the parrot's."""
    parts = [message(turn[key], channel) for key, channel in
             (("thinking", "analysis"), ("preamble", "commentary"), ("answer", "final")) if turn.get(key)]
    if "call" in turn:
        parts.append(message(turn["call"]["arguments"], "commentary", recipient="functions.get_weather",
                             content_type="<|constrain|>json"))
    return parts


def test_conversations_parsed():
    """Every completion of the parrot; as messages again in a prompt they are the same tokens, but never <|return|>."""
    def check(name, turn):
        messages, err = parse(turn["completion_ids"])
        same(messages, completed(turn), "messages")
        same(err, "", "stderr")
        if "call" not in turn:
            again = render({"bare": True, "keep_analysis": True, "add_generation_prompt": False, "messages": messages})
            same(again, turn["prompt_ids"][-2:] + turn["completion_ids"][:-1] + [ADDED["<|end|>"]], "ids")
    each([(name, turn) for name, c in CONVERSATIONS.items() for turn in c["turns"]], check)


FINAL_HI = message("Hi", "final")
CALL = dict(channel="commentary", recipient="functions.f")
STREAMS = [  # what, the text of the tokens, the messages, whether something had to be repaired
    ("nothing", "", [], False),
    ("no end", "<|channel|>final<|message|>Hi", [FINAL_HI], False),
    ("ends amid the name of a channel", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>fin",
     [message("Hm", "analysis")], True),
    ("ends amid a name, by return", "<|channel|>fin<|return|>", [message("fin")], True),
    ("ends by call", "<|channel|>final<|message|>Hi<|call|>", [FINAL_HI], False),
    ("ends by endoftext", "<|channel|>final<|message|>Hi<|endoftext|>", [FINAL_HI], False),
    ("no channel", "<|message|>Hi<|return|>", [message("Hi")], False),
    ("a channel that nobody knows", "<|channel|>dreams<|message|>Hi<|return|>", [message("Hi", "dreams")], False),
    ("recipient behind the channel, type json", "<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
     [message("{}", **CALL, content_type="json")], False),
    ("recipient before the channel, type code", " to=functions.f<|channel|>commentary code<|message|>{}<|call|>",
     [message("{}", **CALL, content_type="code")], False),
    ("constraint that touches", "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
     [message("{}", **CALL, content_type="<|constrain|>json")], False),
    ("recipient on the channel analysis", "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
     [message("{}", "analysis", recipient="functions.f", content_type="code")], False),
    ("two messages", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     [message("A", "analysis"), FINAL_HI], False),
    ("names of control tokens as text", "<|channel|>final<|message|><<|end|>", [message("<", "final")], False),
    ("no message token", "<|channel|>analysis I must refuse<|end|>", [message("I must refuse", "analysis")], True),
    ("no header at all", "Hi<|return|>", [message("Hi")], True),
    ("two ends", "<|channel|>final<|message|>Hi<|end|><|end|>", [FINAL_HI], True),
    ("message token twice", "<|channel|>final<|message|>H<|message|>i<|return|>", [FINAL_HI], True),
    ("constraint in the text", "<|channel|>final<|message|>H<|constrain|>i<|return|>", [FINAL_HI], True),
    ("start twice", "<|start|><|start|>assistant<|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("start without author", "<|start|><|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("no start", "<|channel|>analysis<|message|>A<|end|><|channel|>final<|message|>Hi<|return|>",
     [message("A", "analysis"), FINAL_HI], True),
    ("no end before the next start",
     "<|channel|>analysis<|message|>A<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     [message("A", "analysis"), FINAL_HI], True),
    ("no end before the next channel", "<|channel|>analysis<|message|>A<|channel|>final<|message|>Hi<|return|>",
     [message("A", "analysis"), FINAL_HI], True),
    ("a reserved token", "<|channel|>final<|message|>H<|reserved_411|>i<|return|>", [FINAL_HI], True),
    ("no start, but the author",
     "<|channel|>analysis<|message|>A<|end|>assistant<|channel|>final<|message|>Hi<|return|>",
     [message("A", "analysis"), FINAL_HI], True),
    ("the author twice", "assistant<|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("an author that nobody is", "<|start|>king<|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("words before the channel", "<|start|>assistant of all<|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("a channel twice", "<|channel|>final<|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("another channel", "<|channel|>analysis<|channel|>final<|message|>Hi<|return|>", [FINAL_HI], True),
    ("a channel behind text", "<|channel|>analysis I think<|channel|>final<|message|>Hi<|return|>",
     [message("I think", "analysis"), FINAL_HI], True),
    ("a constraint twice", "<|channel|>commentary to=functions.f<|constrain|>json<|constrain|>json<|message|>{}<|call|>",
     [message("{}", **CALL, content_type="<|constrain|>json")], True),
    ("a constraint of nothing", "<|channel|>commentary to=functions.f <|constrain|><|message|>{}<|call|>",
     [message("{}", **CALL)], True),
    ("a function without a name", "<|channel|>commentary to=functions. <|constrain|>json<|message|>{}<|call|>",
     [message("{}", "commentary", content_type="<|constrain|>json")], True),
    ("words before the arguments", "<|channel|>commentary to=functions.f I call<|message|>{}<|call|>",
     [message("{}", **CALL)], True),
    ("text touches the channel", "<|channel|>finalHi<|return|>", [FINAL_HI], True),
    ("text touches the channel, and a message token", "<|channel|>finalHi<|message|> there<|return|>",
     [message(" there", "final")], True),
    ("text behind an unknown channel", "<|channel|>dreams of Hi<|return|>", [message("dreams of Hi")], True),
    ("text that begins like a header", "user json final<|return|>", [message("user json final")], True),
    *[(f"words of a header: {junk}", f"<|channel|>commentary{junk}<|message|>{{}}<|call|>", [message("{}", **CALL)], True)
      for junk in (" ?? to=functions.f", " to=functions.f ?? !", "?? to=functions.f", " ??to=functions.f",
                   " 彩票 final to=functions.f", " user to=functions.f", " to=functions.f<|channel|>commentary")],
    ("words behind the channel", "<|channel|>final of all<|message|>Hi<|return|>", [FINAL_HI], True),
    ("a channel twice behind a recipient, and a constraint",
     "<|channel|>commentary to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
     [message("{}", **CALL, content_type="<|constrain|>json")], True),
    *[(f"no arguments, ended by {end}", f"<|channel|>commentary to=functions.f<|message|>{end}", [message("{}", **CALL)],
       end == "<|start|>") for end in ("<|call|>", "<|end|>", "<|return|>", "<|start|>")],
    ("blank arguments", "<|channel|>commentary to=functions.f<|message|> <|call|>", [message(" {}", **CALL)], False),
    ("arguments that a limit cut", "<|channel|>commentary to=functions.f<|message|>", [], False),
    *[(f"to {who}", f"<|channel|>commentary to={who}<|message|>Hi<|end|>", [message("Hi", "commentary")], True)
      for who in ("assistant", "user", "all")],
    ("a user's turn", "<|channel|>final<|message|>Hi<|end|><|start|>user<|message|>Go on<|end|>",
     [FINAL_HI, {"role": "user", "content": "Go on"}], False),
    *[(f"a header of {who} without end", f"<|channel|>final<|message|>Hi<|end|><|start|>{who} Go on<|end|>", [FINAL_HI], True)
      for who in ("user", "functions.f", "functions.f to=assistant")],
    ("a tool's result", "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>",
     [{"role": "tool", "name": "functions.f", "channel": "commentary", "recipient": "assistant", "content": "7"}], False),
    ("arguments that touch the name", '<|channel|>commentary to=functions.f{"a": 1}<|call|>', [message('{"a": 1}', **CALL)], True),
    ("a call without message token", "<|channel|>commentary to=functions.f <|constrain|>json{}<|call|>",
     [message("{}", **CALL, content_type="<|constrain|>json")], True),
]


def test_malformed_streams():
    def check(name, text, messages, repaired):
        found, err = parse(tokenize(text, PARROT, "--special"))
        same(found, messages, "messages")
        expect(("repair" in err) == repaired, f"stderr: {err!r}")
    each(STREAMS, check)


def test_no_bytes_leak_between_messages():
    """A cut emoji at the end of one message, the rest of it at the beginning of the next."""
    emoji = tokenize("😀")
    expect(len(emoji) > 1, "the test is wrong: the emoji is one token")
    begin, middle = (tokenize(t, PARROT, "--special") for t in
                     ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"))
    for cut in range(1, len(emoji)):
        found, _ = parse(begin + emoji[:cut] + middle + emoji[cut:] + [ADDED["<|return|>"]])
        same([m["channel"] for m in found], ["analysis", "final"], "channels")
        for m in found:
            expect(m["content"] and set(m["content"]) == {"\ufffd"}, f"content {m['content']!r}")


def random_streams(n, seed=3):
    """Tokens at random: control tokens, pieces of headers, single bytes, ids without text, ids outside."""
    rng = random.Random(seed)
    pieces = [tokenize(t) for t in ("assistant", "final", "analysis", "commentary", " to=functions.f", " to=", "json",
                                    " <|end|>", "functions.f", "user", "\x01\x02", "\n")]
    kinds = [lambda: [rng.choice(list(ADDED.values()))], lambda: rng.choice(pieces), lambda: [rng.randrange(400)],
             lambda: [rng.randrange(256)], lambda: [rng.randrange(421, 448)], lambda: [rng.randrange(448, 1 << 31)]]
    for i in range(n):
        weights = [rng.random() ** 2 + 0.01 for _ in kinds]
        yield f"stream {i}", [t for _ in range(400) for t in rng.choices(kinds, weights)[0]()]


def test_random_streams_never_abort():
    """Whatever was sampled becomes messages in UTF-8."""
    def check(name, ids):
        for m in parse(ids)[0]:
            expect(m["role"] in ("system", "developer", "user", "assistant", "tool"), f"role {m['role']!r}")
            expect(isinstance(m["content"], str) and all(isinstance(v, str) for v in m.values()), f"message {m}")
    each(random_streams(60), check)


def test_messages_of_random_streams_go_into_prompts():
    """What was read and repaired is a conversation like any other: it can be saved, loaded and continued."""
    def check(name, ids):
        messages, _ = parse(ids)
        infer("render", PARROT, stdin=json.dumps({"messages": [HI] + messages + [HI]}))
    each(random_streams(40, seed=4), check)
