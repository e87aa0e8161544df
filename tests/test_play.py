"""`infer play` with the parrot, whose answers are known: one answer to a prompt, and the conversation in a terminal."""
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import termios
import time

from test_chat import LOOKS_LIKE_CALLS, speaker

from helpers import (CHECKED, CONVERSATIONS, DATE, FIXTURES, GOLDENS, HOME, PARROT, Skip, Terminal, answered, check_sanitizers,
                     conversation, copy_model, data, each, expect, has, ids_of, infer, needs, patience, play, read_json,
                     read_safetensors, refused, render, same, start, until, write_json)

REASONS = "token limit|stop text|context full|interrupted|tool call"
STATISTICS = re.compile(rf"\[[\d.]+ tokens/s · (\d+) tokens?(?: · ({REASONS}))? · context \d+% · .*\]\n")
TOLD = " tokens/s"  # the statistics
GREEDY = ["--temperature", "0", "--date", DATE]
HELLO = CONVERSATIONS["hello"]["turns"][0]
COUNT = CONVERSATIONS["count"]["turns"][0]
THINK = CONVERSATIONS["think"]["turns"][0]
WITHOUT_TOOLS = [(name, c) for name, c in CONVERSATIONS.items() if not c["tools"]]


def ask(prompt, *options, **how):
    return infer("play", PARROT, "-p", prompt, *GREEDY, *options, **how)


def ask_json(prompt, *options, **how):
    return json.loads(ask(prompt, "--json", *options, **how).out)


def options_of(c):
    return ["-e", c["effort"], "--date", c["date"] or "none", *(["-s", c["system"]] if c["system"] else [])]


# ---- one answer

def test_only_the_answer_is_on_stdout(folder):
    """The prompt from -p, -f and stdin; the statistics on stderr."""
    def check(name, way, c):
        turn = c["turns"][0]
        (folder / name).write_text(turn["user"])
        prompt = {"-p": ["-p", turn["user"]], "-f": ["-f", folder / name], "stdin": []}[way]
        r = infer("play", PARROT, *prompt, *GREEDY, *options_of(c), stdin="" if prompt else turn["user"])
        same(r.text, turn["answer"] + "\n", "stdout")
        found = STATISTICS.search(r.err)
        expect(found and not found[2] and int(found[1]) == len(turn["completion_ids"]), f"stderr: {r.err!r}")
        expect("thinking:" not in r.err, f"thinking is shown without a terminal: {r.err!r}")
    each([(n, "-p", c) for n, c in WITHOUT_TOOLS] + [(n, way, CONVERSATIONS[n]) for n in (
        "hello_pirate", "control_text", "code") for way in ("-f", "stdin")], check)


def test_json():
    def check(name, c):
        turn = c["turns"][0]
        r = ask(turn["user"], "--json", "--seed", 5, *options_of(c))
        same(r.text.count("\n"), 1, "number of lines")
        same(r.err, "", "stderr")
        found = json.loads(r.out)
        timed = [found.pop(key) for key in ("first_token_ms", "tokens_per_second")]
        expect(all(t > 0 for t in timed), f"times {timed}")
        thinking = found.pop("thinking_tokens")
        expect((0 < thinking < len(turn["completion_ids"])) if turn["thinking"] else thinking == 0,
               f"thinking_tokens {thinking}")
        same(found, {"model": str(PARROT), "text": turn["answer"], "thinking": turn["thinking"], "reason": "end",
                     "prompt_tokens": len(turn["prompt_ids"]), "tokens": len(turn["completion_ids"]),
                     "seed": 5}, "object")
    each([(n, c) for n, c in WITHOUT_TOOLS if n != "count"], check)


def test_without_tools_a_call_is_text(folder):
    """It is the answer, alone on stdout."""
    needs("formats", "families")
    def check(name, tokens, text):
        model = speaker(name, folder, *tokens)
        same(infer("play", model, "-p", "Hi", *GREEDY).text, text + "\n", "stdout")
        found = json.loads(infer("play", model, "-p", "Hi", *GREEDY, "--json").out)
        same((found["text"], found["reason"]), (text, "end"))
    each(LOOKS_LIKE_CALLS, check)


STOPS = [  # question, texts that stop, what is left of the answer, the reason
    ("Hello!", ["can"], "Hello! How ", "stop text"), ("Hello!", ["w can I h"], "Hello! Ho", "stop text"),
    ("Hello!", ["help", "How"], "Hello! ", "stop text"), ("Hello!", ["Ho", "How can"], "Hello! ", "stop text"),
    ("Hello!", ["Hello"], "", "stop text"), ("Hello!", ["you?"], "Hello! How can I help ", "stop text"),
    ("Hello!", ["zebra"], HELLO["answer"], "end"), ("Hello!", ["you?!"], HELLO["answer"], "end"),
    ("Hello!", ["greet"], HELLO["answer"], "end"), ("Count to three.", [" 3"], "1 2", "stop text"),
    ("Show me Unicode.", ["漢字"], "é ñ ß Ж Ω א あ ", "stop text"),
    ("Show me Unicode.", ["\u200d"], "é ñ ß Ж Ω א あ 漢字 한국 😀 👩", "stop text"),
    ("Show me code.", ["\n"], "```c", "stop text"),
    ("Show me code.", ["}\n```"], "```c\nint main(void) {\n    return 0;\n", "stop text")]


def test_stop_texts():
    """They end the answer before them, across tokens, and do not count in the reasoning."""
    def check(question, stops, left, reason):
        options = [o for s in stops for o in ("--stop", s)]
        found = ask_json(question, *options)
        same((found["text"], found["reason"]), (left, reason), "text and reason")
        if question != "Hello!":
            same(ask(question, *options).text, left + "\n" * (left[-1:] != "\n"), "stdout")
    each(STOPS, check)


def test_token_limit():
    ids = HELLO["completion_ids"]

    def check(name, limit, reason):
        found = ask_json("Hello!", "--max-tokens", limit)
        same((found["tokens"], found["reason"]), (min(limit or len(ids), len(ids)), reason), "tokens and reason")
        expect(found["text"] and HELLO["answer"].startswith(found["text"]), f"text {found['text']!r}")
        expect(reason != "end" or found["text"] == HELLO["answer"], f"text {found['text']!r}")
        r = ask("Hello!", "--max-tokens", limit)
        same(r.text, found["text"] + "\n", "stdout")
        expect((STATISTICS.search(r.err)[2] or "end") == reason, f"stderr: {r.err!r}")
    each([("in the answer", 40, "token limit"), ("one before the end", len(ids) - 1, "token limit"),
          ("at the end", len(ids), "end"), ("behind the end", len(ids) + 1, "end"), ("0: none", 0, "end")], check)


def test_token_limit_in_the_reasoning():
    """No answer, exit code 1, and the message names the option."""
    for limit in (1, 2, 10, 25):
        r = ask("Hello!", "--max-tokens", limit, code=1)
        same(r.text, "", "stdout")
        expect("thinking (token limit): --max-tokens raises it" in r.err, f"stderr: {r.err!r}")
        found = ask_json("Hello!", "--max-tokens", limit, code=1)
        same((found["text"], found["reason"], found["tokens"]), ("", "token limit", limit), "text, reason and tokens")


def test_seeds():
    """The same seed gives the same text, another one some time another; a seed that was drawn can be given again."""
    def texts(*options):
        found = json.loads(infer("play", PARROT, "-p", "Show me Unicode.", "--max-tokens", 60, "--json", *options,
                                 code=None).out)
        return found["thinking"], found["text"], found["seed"]
    for temperature in ("1", "3"):
        seen = [texts("--temperature", temperature, "--seed", s) for s in ("1", "2", "3")]
        same(texts("--temperature", temperature, "--seed", "1"), seen[0], f"text at temperature {temperature}")
    expect(len({s[:2] for s in seen}) > 1, "three seeds give one text")
    drawn = texts("--temperature", "3")
    same(texts("--temperature", "3", "--seed", str(drawn[2])), drawn, "text with the seed that was drawn")
    expect(texts("--temperature", "3")[2] != drawn[2], "the seed is not random")


def test_filters_that_leave_one_token():
    """At any temperature the likeliest token remains."""
    each([("--top-k", 1), ("--top-p", 0.000001), ("--min-p", 1), ("--temperature", 0.009)], lambda name, value: same(
        ask("Hello!", "--temperature", 50, "--seed", 3, name, value).text, HELLO["answer"] + "\n", "stdout"))


def test_context():
    def check(name, options, code, words):
        r = ask("Hello!", *options, code=code)
        missing = [w for w in words if w not in r.err.replace(",", "")]
        expect(not missing, f"the message lacks {missing}: {r.err!r}")
    n = len(HELLO["prompt_ids"])
    each([("prompt does not fit", ["--ctx", n - 1], 4, [str(n), str(n - 1), "--ctx"]),
          ("prompt fits exactly", ["--ctx", n], 4, ["--ctx"]),
          ("full while thinking", ["--ctx", n + 10], 1, ["context full"]),
          ("full in the answer", ["--ctx", n + 45], 0, ["context full"]),
          ("enough", ["--ctx", n + len(HELLO["completion_ids"])], 0, [" tokens · context "]),
          ("all of it", ["--ctx", 4096], 0, [" tokens · context "]),
          ("more than the model was made for", ["--ctx", 4097], 2, ["4097", "use --ctx 4096"])], check)


WRONG = [  # arguments behind `play PARROT`, exit code, words of the message
    (["--zebra"], 2, []), (["-p"], 2, []), (["-p", "x", "-f", "y"], 2, ["-p", "-f"]),
    (["-p", "x", "another"], 2, ["another"]), (["-p", ""], 2, ["empty"]), (["-p", " \n"], 2, ["empty"]),
    ([], 2, ["empty"]), (["-f", "/does/not/exist"], 2, ["/does/not/exist"]), (["-f", "/"], 2, ["/"]),
    (["-f", "/dev/zero"], 2, ["/dev/zero"]), (["-p", "x", "-e", "huge"], 2, ["effort", "huge"]),
    *((["-p", "x", f"--{o}", v], 2, [o]) for o, values in (
        ("temperature", ["-1", "x", "", "nan", "inf", "101", "1x"]), ("top-k", ["-1", "1.5", "x"]),
        ("top-p", ["0", "-1", "1.1", "x", "nan"]), ("min-p", ["-0.1", "1.1", "x"]),
        ("repetition-penalty", ["0", "-1", "x", "1e9"]), ("frequency-penalty", ["2.1", "-2.1", "x"]),
        ("presence-penalty", ["3", "-3"]), ("seed", ["-1", "x", "1.5", "18446744073709551616"]),
        ("max-tokens", ["-1", "x", "1.5", "9999999999"]), ("ctx", ["0", "-1", "x", "99999999999"]),
        ("gpu", ["-1", "x"]))
      for v in values),
    (["-p", "x", "--stop", ""], 2, ["--stop"]), (["-p", "x", *["--stop", "y"] * 17], 2, ["--stop", "16"]),
    (["-p", "x", "--raw", "-s", "Be brief."], 2, ["raw"]), (["-p", "x", "--raw", "-e", "low"], 2, ["raw"])]


def test_wrong_options():
    def check(name, options, code, words):
        r = infer("play", PARROT, *options, code=code)
        same(r.text, "", "stdout")
        lines = r.err.splitlines()
        expect(lines and lines[-1].startswith("infer: ") and len(lines) <= 2, f"stderr: {r.err!r}")
        missing = [w for w in words if w not in r.err]
        expect(not missing, f"the message lacks {missing}: {r.err!r}")
    each([(" ".join(map(repr, w[0])), *w) for w in WRONG], check)
    if not has("formats"):
        refused("play", PARROT, "-p", "Hi", "--chat-template", GOLDENS / "SOURCES.md", words=["does not read chat templates"])


def test_prompt_and_stdin(folder):
    """The text on stdin stands behind that of -p; -f - is stdin."""
    (folder / "text").write_text("~~~")
    for options, stdin, prompt in ((["-p", "Hello!"], "~~~", "Hello!\n\n~~~"), (["-f", "-"], "Hello!", "Hello!"),
                                   (["-f", "/dev/stdin"], "Hello!", "Hello!"),  # any kind of file
                                   (["-p", "Hello!"], "", "Hello!"), (["-f", folder / "text"], "Hello!", "~~~")):
        found = json.loads(infer("play", PARROT, *options, "--json", "--max-tokens", 1, *GREEDY, stdin=stdin, code=1).out)
        same(found["prompt_tokens"], len(render({"messages": [{"role": "user", "content": prompt}], "date": DATE})),
             f"tokens of {prompt!r}")
    refused("play", PARROT, "-p", "x", stdin=b"a\xff", code=2, words=["UTF-8", "byte 4"])
    with start("play", PARROT, "-p", "Hello!", *GREEDY, stdin=-1, stdout=-1, stderr=-1) as p:  # an idle pipe is named
        expect(b"stdin" in p.stderr.readline(), "nothing is said about stdin")
        expect(p.communicate(timeout=patience(60))[0], "no answer behind it")


def test_stdin_that_cannot_be_read(folder):
    """A folder and a failing device are errors; what nohup and a shell's <&- leave is no stdin."""
    def check(name, how, *args):
        fd = os.open(*how)
        with start(*args, stdin=fd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
            os.close(fd)
            out, err = p.communicate(timeout=patience(60))
        if how[1] == os.O_WRONLY:
            return same((p.returncode, out), (0, ask("Hello!").out), "exit code and answer")
        expect(p.returncode == 2 and not out and err.startswith(b"infer: stdin cannot be read: ") and err.count(b"\n") == 1,
               f"exit code {p.returncode}, {err!r}")
    directory, broken, nohup = (folder, os.O_RDONLY), ("/proc/self/mem", os.O_RDONLY), ("/dev/null", os.O_WRONLY)
    prompt = ("play", PARROT, "-p", "Hello!", *GREEDY)
    each([("play", directory, *prompt), ("EIO", broken, *prompt), ("nohup", nohup, *prompt),
          ("tokenize", directory, "tokenize", PARROT),
          *[("perplexity", directory, "perplexity", PARROT, "-f", "-")] * has("commands")], check)
    refused("play", PARROT, "-f", "/proc/self/mem", code=2, words=["/proc/self/mem", "Input/output error"])


def test_stdin_is_a_terminal():
    """One Ctrl+D behind a line ends it."""
    with Terminal("tokenize", PARROT) as t:
        t.wait("reading stdin until its end (Ctrl+D)")
        t.send("Hello\n\x04")
        t.wait("[", "]")
        same(t.ended(), 0, "exit code")


def test_stdout_that_cannot_be_written():
    """A full disk: exit code 1 and one line. A pipe that nobody reads: silence, as of other tools."""
    def check(name, *args):
        with open("/dev/full", "wb") as full, start(*args, stdin=subprocess.DEVNULL, stdout=full, stderr=-1) as p:
            err = p.communicate(timeout=patience(60))[1].decode()
        expect(p.returncode == 1 and "infer: the output" in err, f"/dev/full: exit code {p.returncode}, {err!r}")
        reader, writer = os.pipe()
        os.close(reader)
        with start(*args, stdin=subprocess.DEVNULL, stdout=writer, stderr=-1) as p:
            os.close(writer)
            err = p.communicate(timeout=patience(60))[1].decode()
        same((p.returncode, err), (128 + signal.SIGPIPE, ""), "closed pipe: exit code and stderr")
    each([("play", "play", PARROT, "-p", "Count.", *GREEDY), ("--json", "play", PARROT, "-p", "Hello!", "--json", *GREEDY),
          ("tokenize", "tokenize", PARROT), *[("list", "list")] * has("commands"), ("logits", "logits", PARROT, "-p", "x"),
          ("--help", "play", "--help"), ("--version", "--version")], check)


def test_options_of_all_commands():
    """No abbreviations, nothing of an unknown option's value is shown, extra arguments are refused, numbers say what
    they may be."""
    def check(name, args, words):
        r = refused(*args, code=2, words=words)
        expect("hf_" not in r.err.replace("'hf_...'", ""), f"a secret is shown: {r.err!r}")
    each([("abbreviated", ["download", "org/x", "--token", "hf_secret"], ["no option --token;", "download --help"]),
          ("with =", ["download", "org/x", "--token=hf_secret"], ["no option --token;"]),
          ("behind", ["download", "org/x", "hf_secret"], ["one argument too many"]), ("letter", ["render", "-xhf_secret"], ["no option -x;"]),
          ("of another command", ["render", "--gpu", "1"], ["no option --gpu;"]),
          ("one letter, two dashes", ["play", "--p", "x"], ["no option --p;"]),
          ("two", ["render", "a", "b"], ["too many", "'b'"]),
          *[("argument", ["list", "x"], ["'x'", "too many"]),
            ("list", ["bench", "-b", "1,x"], ["--streams", "'1,x'"])] * has("commands"),
          ("missing", ["tokenize"], ["MODEL is missing"]), ("switch", ["play", "--raw=1"], ["--raw takes no value"]),
          ("no value", ["play", "--seed"], ["--seed needs a value"]),
          ("number", ["logits", PARROT, "-p", "x", "--top", "hot"], ["--top must be a whole number", "'hot'"]),
          ("real", ["play", "--temperature", "hot"], ["--temperature must be 0 to 100, not 'hot'"])], check)
    for args in (["play", "-h"], ["help", "play"], ["-h", "play"], ["play", "x", "--help", "y"]):
        expect(infer(*args).text.startswith("infer play"), f"{args}")
    refused("tokenize", "--", "-h", code=3, words=["-h"])  # a model of that name
    expect("zebra" in infer("zebra", code=2).err, "an unknown command is not named")


def test_wrong_models(folder):
    empty, file = folder / "empty", folder / "file"
    empty.mkdir()
    file.write_text("x")
    (half := copy_model(PARROT, folder)).joinpath("tokenizer.json").unlink()
    each([("without tokenizer.json", [half], ["tokenizer.json", "infer download"]),
          ("none there", ["zebra"], ["zebra"]), ("an empty folder", [empty], ["config.json"]),
          ("a file", [file], ["folder"]), ("no folder of that name", [folder / "x" / "y"], ["/x/y"]),
          ("no name at all", [""], []), ("none given", [], ["models"])],
         lambda name, model, words: refused("play", *model, "-p", "x", cwd=empty, words=words))


def test_words_of_other_programs():
    """They are named with what they mean here, and so are slips; nothing far-fetched is."""
    needs("commands", "terminal")
    home = copy_model(PARROT, HOME, name="slips/models/parrot").parent.parent
    each([("run", ["run", "x"], "infer play?"), ("pull", ["pull", "x"], "infer download?"), ("ls", ["ls"], "infer list?"),
          ("delete", ["delete"], "infer rm?"), ("swapped", ["downlaod"], "infer download?"), ("begun", ["tok"], "infer tokenize?"),
          ("-n", ["play", "-n", "5"], "--max-tokens?"), ("-t", ["play", "-t", "1"], "--temperature?"),
          ("-m", ["play", "-m", "x"], "the model needs no option"), ("--model=x", ["bench", "--model=x"], "needs no option"),
          ("a letter missing", ["play", "--temprature", "1"], "--temperature?"), ("two swapped", ["play", "--tpo-k", "1"], "--top-k?"),
          ("begun", ["play", "--max", "1"], "--max-tokens?"), ("a model", ["play", "parrto", "-p", "x"], "models/parrot?"),
          ("a prompt alone", ["play", "Why is it so?", "-p", "x"], "a prompt stands behind MODEL"),
          ("a text without quotes", ["play", "parrot", "why", "so"], "a text without quotes")],
         lambda name, args, words: refused(*args, code=3 if "-p" in args else 2, words=[words], cwd=home))
    for args in (["zebra"], ["play", "--zebra"], ["play", "zebra", "-p", "x"], ["render", "-n", "5"]):
        expect("did you mean" not in infer(*args, code=None).err, f"{args}")


def test_a_prompt_behind_the_model():
    same(infer("play", PARROT, "Hello!", *GREEDY).text, HELLO["answer"] + "\n", "stdout")
    expect("no room" not in infer("logits", PARROT, "Hello!", "--top", 1).err, "logits")
    refused("play", PARROT, "Hello!", "-f", "x", code=2, words=["-p", "-f"])


def test_quiet():
    """--quiet leaves only the answer, in a terminal too; /set stats switches what stands behind it."""
    same(ask("Hello!", "--quiet").err, "", "stderr")
    with Terminal("play", PARROT, "-p", "Hello!", "--quiet", "--hide-thinking", *GREEDY) as t:
        same(t.ended(), 0, "exit code")
    same(t.text().strip(), HELLO["answer"], "what a terminal shows")
    if not has("terminal"):
        return
    with play() as t:
        expect("stats on" in t.say("/set") and "stats off" in t.say("/set stats off"), "/set")
        same(t.say("Hello!", HELLO["answer"] + "\n"), shown_turn(HELLO) + "\n", "with stats off")
        t.say("/set stats on")
        expect(TOLD in t.say("Hello!", TOLD), "with stats on")
        same(t.say("/set stats maybe"), "stats must be on or off, not 'maybe'\n", "a wrong value")


def test_statistics_are_one_line():
    """At any width, the most important first; a name of the model, its family and context after loading."""
    needs("terminal")
    for columns in (40, 80, 100):
        with play(columns=columns) as t:
            lines = t.say("Hello!", TOLD).splitlines()
            at = next(i for i, line in enumerate(lines) if TOLD in line)
            expect(lines[at].endswith("]") and len(lines[at]) <= columns, f"{columns} columns: {lines[at:]}")
            expect(("first in" in lines[at]) == (columns > 40), f"{columns} columns: {lines[at]}")
        shown = "".join(t.text().split())  # a long path is broken
        expect(f"✓{PARROT}·gpt_oss·context4,096/help" in shown, t.text()[:200])


def test_dates():
    """A day that the calendar has."""
    needs("terminal")
    for date in ("yesterday", "2026-02-30", "2026-13-01", "2026-1-1", "26-01-01", "", "2026-01-01x", "None"):
        refused("play", PARROT, "-p", "x", "--date", date, code=2, words=["--date must be a day like", f"'{date}'"])
    ask("Hello!", "--date", "2024-02-29", "--max-tokens", 1, code=1)


def test_effort_of_a_model_without(folder):
    """It says so, instead of agreeing to what makes no difference."""
    needs("terminal", "formats", "families")
    model = speaker("Qwen2.5", folder, *LOOKS_LIKE_CALLS[0][1])
    refused("play", model, "-p", "Hi", "-e", "low", code=2, words=["has no effort to choose"])
    with Terminal("play", model, *GREEDY) as t:
        t.ready()
        for command in ("/effort", "/effort high", "/effort huge"):
            expect("has no effort to choose" in t.say(command), command)


def test_commands_and_help():
    each([("--help", ["--help"], 0, "infer "), ("--version", ["--version"], 0, "infer "), ("nothing", [], 2, ""),
          ("unknown command", ["zebra"], 2, ""), *((f"{c} --help", [c, "--help"], 0, f"infer {c}") for c in (
              "play", "logits", "tokenize", "detokenize", "render", "parse", *["perplexity"] * has("commands")))],
         lambda name, args, code, out: expect(infer(*args, code=code).text.startswith(out) if out else
                                              not infer(*args, code=code).text, "stdout"))
    for command in ("", "play", "download", *["bench"] * has("commands")):
        help = infer(*command.split(), "--help").text
        wide = max(map(len, help.splitlines())) > 100 and has("terminal")  # which breaks lines
        expect(" \n" not in help and not wide, f"lines of {command} --help: {help!r}")


def test_a_conversation_needs_a_terminal():
    same(infer("play", PARROT, code=2, stdin="").text, "", "stdout")
    with Terminal("play", PARROT, "--json") as t:
        same(t.ended(), 2, "exit code")


def test_interrupted_answer():
    """Exit code 130; what was answered so far is on stdout."""
    with start("play", PARROT, "-p", "Count.", *GREEDY, stdout=-1, stderr=-1) as p:
        first = os.read(p.stdout.fileno(), 4)  # not what a buffer would take in advance, and communicate() not find
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=patience(60))
    text = (first + out).decode()
    same(p.returncode, 130, "exit code")
    expect(text.endswith("\n") and COUNT["answer"].startswith(text[:-1]), f"stdout {text!r}")
    expect(len(text) < len(COUNT["answer"]), "it went on")
    expect("interrupted ·" in err.decode(), f"stderr {err!r}")


def test_interrupted_reasoning():
    with Terminal("play", PARROT, "-p", "Think.", *GREEDY) as t:
        t.wait("thinking: One sheep")
        t.send("\x03")
        same(t.ended(), 130, "exit code")
        expect("Done." not in t.text() and "Twenty" not in t.text(), "it went on")


def processor_time(process):
    """Seconds."""
    with open(f"/proc/{process.pid}/stat") as f:
        return sum(map(int, f.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def test_interrupted_prompt(folder):
    (folder / "prompt").write_text("~" * 3900)  # as many tokens: seconds of reading
    with Terminal("play", PARROT, "-f", folder / "prompt", *GREEDY) as t:
        t.wait("✓ ", "context 4,096")
        loaded = processor_time(t.process)
        until(lambda: processor_time(t.process) > loaded + 0.3, "reading")
        t.send("\x03")
        expect(t.ended() in (130, -signal.SIGINT), "exit code")
        expect("thinking" not in t.text(), "it went on")


# ---- without a chat format

def letters_model(folder, fixture="odd", vocab=301):
    """A fixture with a tokenizer of one character a token: the i-th from U+4E00 on is i."""
    model = copy_model(FIXTURES / fixture, folder)
    vocabulary = {chr(0x4e00 + i): i for i in range(vocab)}
    write_json(model / "tokenizer.json", {
        "added_tokens": [], "decoder": {"type": "Fuse"}, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}})
    return model


def test_text_is_continued_raw(folder):
    """A model without chat format: the likeliest next token by transformers' logits."""
    def check(fixture, vocab):
        model = letters_model(folder, fixture, vocab)
        header, content = read_safetensors(FIXTURES / fixture / "golden.safetensors")
        ids, rows = (struct.unpack(f"<{(b - a) // 4}{kind}", content[a:b]) for (a, b), kind in
                     ((header["ids"]["data_offsets"], "i"), (header["logits"]["data_offsets"], "f")))
        for n in (1, 7, 20):
            row = rows[(n - 1) * vocab:n * vocab]
            found = json.loads(infer("play", model, "-p", "".join(chr(0x4e00 + i) for i in ids[:n]), "--max-tokens", 1,
                                     "--json", *GREEDY).out)
            same((found["text"], found["thinking"], found["prompt_tokens"]), (chr(0x4e00 + row.index(max(row))), "", n),
                 f"after {n} tokens")
    each([("odd", 301), *[("llama_bias", 131)] * has("families")], check)
    model = letters_model(folder)
    for options in (["-s", "Be brief."], ["-e", "low"]):
        refused("play", model, "-p", "\u4e00", *options, code=2, words=["raw"])
    refused("render", model, stdin='{"messages": []}', words=["chat format"])


def test_raw_mode_leaves_the_chat_format_away():
    """Without harmony the parrot reads the text alone; what follows is what `logits` finds likeliest."""
    ids = ids_of(infer("tokenize", PARROT, stdin="Hello <|end|>"))
    found = ask_json("Hello <|end|>", "--raw", "--max-tokens", 3)
    same(found["prompt_tokens"], len(ids), "prompt_tokens")
    for _ in range(3):
        ids.append(int(infer("logits", PARROT, "--ids", ",".join(map(str, ids)), "--top", 1).text.split()[0]))
    expect(max(ids[-3:]) < 400, f"the test is wrong: a control token in {ids[-3:]}, which ends the text or is not shown")
    same(found["text"], infer("detokenize", PARROT, stdin=json.dumps(ids[-3:])).text, "text")


def test_tinystories():
    """A published model, greedy, against what others computed."""
    needs("families")
    model, golden = data("models/TinyStories-656K"), read_json(GOLDENS / "TinyStories-656K.json")
    r = infer("play", model, "-p", golden["prompt"], "--max-tokens", len(golden["greedy_ids"]), *GREEDY)
    whole = infer("detokenize", model, stdin=json.dumps(golden["prompt_ids"] + golden["greedy_ids"])).text
    same(r.text.rstrip("\n"), whole[whole.index(golden["prompt"]) + len(golden["prompt"]):].rstrip("\n"), "text")


def test_stories260K():
    """The same against the output that llama2.c's tests expect."""
    needs("families")
    stories = data("models/stories260K")
    expected = (stories / "expected_greedy_200.txt").read_text()
    r = infer("play", stories, "-p", "", "--max-tokens", 200, *GREEDY)
    expect(r.text.strip() and expected.strip().startswith(r.text.strip()), f"stories260K: {r.text[:80]!r}")


# ---- the conversation in a terminal

# Without terminal/ a line is a question and there are no commands: what /prompt shows elsewhere is counted there.

def shown_turn(turn):
    """What the terminal shows of a turn, without the statistics."""
    parts = [("thinking: ", "thinking"), ("Assistant: ", "preamble"), ("Assistant: ", "answer")]
    return "".join(f"{label}{turn[key]}\n" for label, key in parts if turn.get(key))


def text_of_ids(ids):
    return infer("detokenize", PARROT, stdin=json.dumps(ids)).text


def prompt_size(shown):
    """Tokens of the prompt, as the statistics say."""
    return int(re.findall(r" · prompt (\d+), ", shown)[-1])


def size_of(*texts, **more):
    """Tokens of the prompt of a conversation: question, answer, question, ... An answer of None is missing."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts) if text is not None]
    return len(render({"messages": messages, "date": DATE, **more}))


def before(shown):
    """What stands in front of the statistics."""
    return re.split(r"\[[\d.]+ tokens/s", shown)[0]


def questions(t):
    return re.findall(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", t.say("/prompt"), re.S)


def test_conversations_in_a_terminal():
    """Every turn of every conversation, and behind it /prompt: all that the model will read, without its reasoning."""
    def check(name, c):
        with play(*options_of(c)) as t:
            for i, turn in enumerate(c["turns"]):
                shown = t.say(turn["user"], TOLD)
                same(before(shown), shown_turn(turn), f"turn {i}")
                expect(not STATISTICS.search(shown)[2], f"statistics {shown[-100:]!r}")
                same(prompt_size(shown), len(turn["prompt_ids"]), f"tokens of the prompt of turn {i}")
                if has("terminal"):
                    same(t.say("/prompt"), answered(name, i) + "\n", f"/prompt after turn {i}")
            if has("terminal"):
                t.send("/exit \n")
                same(t.ended(), 0, "exit code")
                expect(t.text().endswith("Goodbye!\n"), f"the end {t.text()[-50:]!r}")
    each(WITHOUT_TOOLS, check)


def test_prompt_is_what_render_gives():
    chat = {"messages": [{"role": "system", "content": "Be brief."}], "reasoning_effort": "high", "date": DATE}
    with play("-s", "Be brief.", "-e", "high") as t:
        for question in ("Hello!", "My name is Bob.", "What is my name?"):
            shown = t.say(question, TOLD)
            chat["messages"].append({"role": "user", "content": question})
            same(prompt_size(shown), len(render(chat)), "tokens of the prompt")
            answer = re.search(r"Assistant: (.*)\n\[[\d.]+ tokens/s", shown, re.S)[1]
            chat["messages"].append({"role": "assistant", "content": answer})
            if has("terminal"):
                same(t.say("/prompt"), infer("render", PARROT, stdin=json.dumps(chat)).text + "\n", "/prompt")


SHORT = ["-e", "low", "--max-tokens", "20"]  # for questions whose answer nobody knows
ALL = "/help /exit /clear /system /effort /set /context /retry /undo /save /load /prompt".split()
LOW = CONVERSATIONS["hello_low"]["turns"][0]
COMMANDS = [  # typed, what is shown
    ("/retry", ["no question"]), ("/undo", ["no question"]), ("/context", [" of 4,096 tokens"]),
    ("/help", ALL), ("/?", ALL), ("exit", ["/exit"]), ("/effort", ["medium"]), ("/effort low", ["low"]), 
    ("Hello!", [shown_turn(LOW), f"prompt {len(LOW['prompt_ids'])}, ", f"{len(LOW['completion_ids'])} tokens"]),
    ("/undo", ["Hello!"]), ("/effort high", ["high"]),
    ("Hello!", [shown_turn(CONVERSATIONS["hello_high"]["turns"][0])]), ("/undo", ["Hello!"]),
    ("/effort medium", ["medium"]), ("/system", ["none"]), ("/system Be a pirate.", ["Be a pirate."]),
    ("Hello!", ["Assistant: Arr! Hello!"]), ("/system", ["Be a pirate."]), ("/retry", ["Assistant: Arr! Hello!"]),
    ("/set", ["temperature 0", "top-k 0", "top-p 1", "max-tokens 0"]), ("/set max-tokens 5", ["max-tokens 5"]),
    ("/retry", ["token limit ·", "/set max-tokens"]), ("/set max-tokens 0", ["max-tokens 0"]),
    ("/retry", ["Assistant: Arr! Hello!"]), ("/set seed 7", ["seed 7"]), ("/set temperature 50", ["temperature 50"]),
    ("/set top-k 1", ["top-k 1"]), ("/retry", ["Assistant: Arr! Hello!", "seed 7"]), ("/clear", []),
    ("/undo", ["no question"]), ("/system", ["Be a pirate."]), ("/prompt", ["Be a pirate.<|end|><|start|>assistant"]),
    ("/system none", ["(none)"]), ("/prompt", ["for every message.<|end|><|start|>assistant"])]


def test_slash_commands():
    needs("terminal")
    with play() as t:
        for typed, texts in COMMANDS:
            answers = typed == "Hello!" or (typed == "/retry" and "no question" not in texts)
            shown = t.say(typed, *([TOLD] if answers else []))
            missing = [text for text in texts if text not in shown]
            expect(not missing, f"{typed} does not show {missing}: {shown!r}")


BAD = ["/foo", "/", "/hel", "/helpme", "/HELP", "/effort huge", "/set temperature", "/set temperature -1",
       "/set zebra 1", "/set top-p 0", "/save", "/load", "/load /does/not/exist", "/load /", "/save /does/not/exist/x",
       "//", "/exit now"]


def test_default_settings():
    """Temperature 1 and top-p 1, nothing else."""
    given = ["--temperature", 1, "--top-k", 0, "--top-p", 1, "--min-p", 0, "--repetition-penalty", 1, "--frequency-penalty", 0,
             "--presence-penalty", 0]
    drawn = [json.loads(infer("play", PARROT, "-p", "Hello!", "--seed", 4, "--max-tokens", 60, "--json", *options,
                              code=None).out) for options in ([], given)]
    same(*((d["thinking"], d["text"]) for d in drawn), "what is drawn with all settings given")
    if not has("terminal"):
        return
    with Terminal("play", PARROT) as t:
        t.wait("/help lists")
        t.prompt()
        shown = t.say("/set")
        same(t.say("/set temperature hot"), "temperature must be 0 to 100, not 'hot'\n", "a wrong setting")
        same(t.say("/set zebra 1"), "there is no setting 'zebra'; /set shows all\n", "no setting")
        for setting in ("temperature 1", "top-k 0", "top-p 1", "min-p 0", "repetition-penalty 1", "frequency-penalty 0",
                        "presence-penalty 0", "max-tokens 0"):
            expect(re.search(rf"\b{setting}\b(?!\.)", shown), f"not {setting}: {shown!r}")


def test_answers_draw_with_the_seed_plus_their_ordinal():
    def answers(seed, *commands):
        with play("--temperature", "3", "--seed", seed, "--max-tokens", 60) as t:
            shown = [t.say(command, TOLD) for command in commands]
        seeds = [int(re.search(r" · seed (\d+)", s)[1]) for s in shown]
        same(seeds, list(range(seed, seed + len(shown))), "seeds in the statistics")
        return [before(s) for s in shown]
    same(answers(5, "Hello!", "Hello!")[0], answers(5, "Hello!")[0], "the first answer")
    if not has("terminal"):
        return
    second = answers(5, "Hello!", "/retry")[1]
    same(answers(6, "Hello!")[0], second, "the answer with the next seed")
    with play("--temperature", "3", "--seed", 1, "--max-tokens", 60) as t:
        t.say("Hello!", TOLD)
        t.say("/set seed 6")
        same(before(t.say("/retry", TOLD)), second, "the answer with the seed that was set")


def test_bad_commands_change_nothing():
    """They say what is wrong, and nothing of them goes to the model."""
    needs("terminal")
    with play(*SHORT) as t:
        t.say("Hello!", TOLD)
        before = t.say("/prompt"), t.say("/set")
        for typed in BAD:
            shown = t.say(typed)
            expect(shown.strip() and TOLD not in shown and "Assistant:" not in shown, f"{typed} shows {shown!r}")
        same((t.say("/prompt"), t.say("/set")), before, "/prompt and /set")
        t.say(" /foo", TOLD)
        expect("<|start|>user<|message|>/foo<|end|>" in t.say("/prompt"), "a space before it should send it as text")


def test_empty_lines_say_nothing():
    with play() as t:
        for line in ("", " ", "\t", *['""""""'] * has("terminal")):
            t.send(line + "\n")
            t.prompt()
        if has("terminal"):
            same(t.say("/retry"), "there is no question yet\n", "/retry")
        same(prompt_size(t.say("Hello!", TOLD)), size_of("Hello!"), "tokens of the prompt")


def test_several_lines():
    needs("terminal")
    with play(*SHORT) as t:
        t.send('"""one\n')
        t.prompt("...  ")
        t.send("  two /help\n")
        t.prompt("...  ")
        t.send("\n")
        t.prompt("...  ")
        t.say('three"""', TOLD)
        expect("<|message|>one\n  two /help\n\nthree<|end|>" in t.say("/prompt"), "the lines are not in the prompt")
        for line in ('"""', "one", "two"):
            t.send(line + "\n")
            t.prompt("...  ")
        t.say('"""', TOLD)
        expect("<|message|>one\ntwo<|end|>" in t.say("/prompt"), "quotes on lines of their own add line breaks")
        before = t.say("/prompt")
        t.send('"""a\n')
        t.prompt("...  ")
        t.send("b\x03")
        t.prompt()
        same(t.say("/prompt"), before, "/prompt after Ctrl+C between the quotes")
        t.say('"""Hello!"""', TOLD)
        expect("<|message|>Hello!<|end|>" in t.say("/prompt"), "one line in quotes is not in the prompt")


def test_ctrl_c_at_the_prompt_clears_the_line():
    with play() as t:
        t.send("My name is Bob.")
        t.wait("Bob.")
        t.interrupt()
        t.interrupt()
        shown = t.say("Hello!", TOLD)
        same(before(shown), shown_turn(HELLO), "the answer")
        same(prompt_size(shown), size_of("Hello!"), "tokens of the prompt")
        if has("terminal"):
            same(t.say("/prompt"), answered("hello") + "\n", "/prompt")


def test_ctrl_c_in_the_middle_of_the_line():
    """The whole line stays to be read, with ^C behind it."""
    needs("terminal")
    with play(columns=30) as t:
        t.send("one two three four five six seven\x01")
        t.wait("seven")
        t.read(0.5)
        t.send("\x03")
        t.prompt()
        end = t.raw[:t.raw.rindex(b"^C") + 2].decode().rsplit("You: ", 1)[1]
        expect(re.search(r"\n(\x1b\[\d+[CG]|.*seven)\^C$", end), f"^C stands in the text: {end!r}")
        same(t.say("/retry"), "there is no question yet\n", "/retry")


def interrupted(question, at):
    """A conversation that Ctrl+C interrupts when `at` is shown, and what was shown; another one, if the machine was so
    busy that it came too late. Without terminal/ the key discards what the terminal has yet to show."""
    for _ in range(5):
        t = play()
        t.send(question + "\n")
        t.wait("\n")
        shown = t.wait(at)
        t.send("\x03")
        shown += t.prompt()
        if "interrupted ·" in shown:
            return t, shown
        with t:
            pass  # it leaves
    raise AssertionError(f"never interrupted: {shown!r}")


def test_ctrl_c_while_answering_keeps_what_is_there():
    t, shown = interrupted("Count.", "Assistant: 1 2 3")
    with t:
        partial = re.search(r"Assistant: (.*?)\n?\[[\d.]+ tokens/s", shown, re.S)[1].replace("^C", "").rstrip("\n")
        expect(len(partial) < len(COUNT["answer"]), "it went on")
        went_on = t.say("Thank you.", TOLD)
        expect("Assistant: " in went_on, "the conversation does not go on")
        expect(prompt_size(went_on) > size_of("Count.", "1 2 3", "Thank you.") - 1, "the answer's beginning is not kept")
        if not has("terminal"):
            return
        expect(COUNT["answer"].startswith(partial.rstrip()), f"shown {partial!r}")
        t.say("/undo")
        kept = t.say("/prompt")
        before, after = COUNT["prompt"] + "<|channel|>final<|message|>", "<|end|><|start|>assistant\n"
        expect(kept.startswith(before) and kept.endswith(after), f"/prompt {kept[-120:]!r}")
        same(kept[len(before):-len(after)].rstrip(), partial.rstrip(), "what was kept")


def pauses():
    """Seconds, each longer than the last."""
    pause, left = 0.2, patience(30)
    while left > 0:
        yield pause
        left, pause = left - pause, pause * 1.4


def test_ctrl_c_discards_nothing_that_is_still_to_be_shown():
    """A terminal keeps 4,096 bytes for a reader that is slow; of more, Ctrl+C discards what waits, unless told not to."""
    needs("terminal")
    with play() as t:
        for begun in pauses():  # in one of them, machines of any speed are at the answer
            t.send("/clear\n" + "/help\n" * 7 + "Count.\n")
            time.sleep(begun)
            t.send("\x03")
            shown = t.wait("You: Count.") + t.prompt()
            if partial := re.search(r"\nAssistant: (.*?)\n?\[[\d.]+ tokens/s.*interrupted", shown, re.S):
                break
        expect(partial and shown.count("this list\n") == 7, f"shown {shown!r}")
        expect(COUNT["answer"].startswith(partial[1].rstrip()), f"shown {partial[1]!r}")


def written(process):
    """Bytes that it has written, and nobody need have read."""
    with open(f"/proc/{process.pid}/io") as f:
        return int(re.search(r"wchar: (\d+)", f.read())[1])


def test_ctrl_c_discards_nothing_of_a_single_answer(folder):
    """Behind 4,096 bytes that wait. The terminal gets its modes back."""
    needs("terminal")
    # with stderr in a file nothing but the answer is written before its end
    filled = ("import os, sys; print('.' * 4096, flush=True); os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 2); "
              "os.execv(sys.argv[2], sys.argv[2:])")

    def answered(interrupt):
        """Exit code and what was shown."""
        command = ["-c", filled, folder / "stderr", CHECKED, "play", PARROT, "-p", "Count.", *GREEDY]
        with Terminal(*command, program=sys.executable) as t:
            before = termios.tcgetattr(t.main)[3]
            if interrupt:
                until(lambda: written(t.process) > 4097 + 9, "answering")
                t.send("\x03")
            code = t.ended()
            check_sanitizers((folder / "stderr").read_text(), code)
            same(termios.tcgetattr(t.main)[3], before, "modes of the terminal")
        return code, t.text().replace("^C", "")  # the terminal shows that key, anywhere
    same(answered(False)[0], 0, "exit code of an answer that is not interrupted")
    for _ in range(5):  # it may have ended by then
        code, shown = answered(True)
        if code == 130:
            break
    same(code, 130, "exit code")
    expect("\n1 2 3 4 5" in shown, f"shown {shown[4000:]!r}")


def test_ctrl_c_while_thinking_drops_the_turn():
    t, shown = interrupted("Think.", "One sheep")
    with t:
        expect("Assistant:" not in shown, f"an answer: {shown!r}")
        if not has("terminal"):
            size = prompt_size(t.say("Hello!", TOLD))
            return same(size, size_of("Think.", None, "Hello!"), "tokens of the prompt behind it")
        same(t.say("/prompt"), THINK["prompt"] + "\n", "/prompt")
        expect("Assistant: Done.\n" in t.say("/retry", TOLD), "/retry does not answer")
        same(t.say("/prompt"), answered("think") + "\n", "/prompt")


def test_ctrl_c_many_times_never_ends_the_program():
    """Also in the moments between an answer and the next prompt."""
    with play() as t:
        for _ in range(6):
            t.send("Hello!\n")
            for _ in range(80):
                t.send("\x03")
                t.read(0.005)
            expect(t.process.poll() is None, f"it has ended, exit code {t.process.returncode}")
            shown = -1
            while shown != len(t.raw):  # until it is at rest
                shown = len(t.raw)
                t.read(0.5)
        t.seen = len(t.text())
        t.interrupt()
        t.say("Hello!", TOLD)


def test_ctrl_d_leaves():
    with play() as t:
        t.say("Hello!", TOLD)
        t.send("\x04")
        same(t.ended(), 0, "exit code")
        expect(t.text().endswith("Goodbye!\n" if has("terminal") else "You: \n"), f"the end {t.text()[-50:]!r}")


def test_typed_text_of_any_language():
    def check(name, locale):
        text = "Grüße, 漢字 и 😀!"
        with play(*SHORT, LC_ALL=locale) as t:
            t.send(text + "\n")
            shown = t.wait(TOLD) + t.prompt()
            same(prompt_size(shown), size_of(text, reasoning_effort="low"), "tokens of the prompt")
            if has("terminal"):
                same(questions(t), [text], "the question in /prompt")
    each([("in a UTF-8 locale", "C.UTF-8"), ("in none", "")], check)


def test_what_is_typed_ahead_waits():
    with play() as t:
        t.send("Count.\n")
        t.wait("Assistant: 1 2 3")
        t.send("Hello!\n")
        shown = t.wait(TOLD).replace("Hello!\n" * (not has("terminal")), "", 1)  # the terminal shows what is typed
        expect(COUNT["answer"].split("1 2 3", 1)[1] in shown, f"the answer is broken: {shown!r}")
        second = t.wait(TOLD) + t.prompt()
        same(prompt_size(second), size_of("Count.", COUNT["answer"], "Hello!"), "tokens of the prompt")
        if has("terminal"):
            expect("<|message|>Hello!<|end|>" in t.say("/prompt"), "the question is lost")


def test_save_and_load(folder):
    needs("terminal")
    first, other = folder / "first.json", folder / "other"
    with play("-s", "Be a pirate.", "-e", "low", "--max-tokens", 20, HOME=folder) as t:
        t.say("My name is Ada.", TOLD)
        t.say("Show me code.", TOLD)
        before = t.say("/prompt")
        t.say(f"/save {first}", str(first))
        for command in ("/clear", "/system Be brief.", "/effort high", f"/load {first}"):
            t.say(command)
        same(t.say("/prompt"), before, "/prompt after /load")
        t.say("/undo")
        after = t.say("/prompt")
        t.say(f"/save {first}", "Saved")  # the conversation's own file is written again
        t.say("/clear")
        t.say(f"/load {first}", "Loaded")
        same(t.say("/prompt"), after, "/prompt after the second /load")
        other.write_text("precious")
        (folder / "home.json.new").write_text("precious")
        (folder / "wrong.json").write_text("[]")
        expect("exists" in t.say(f"/save {other}"), "a file of the user's is not refused")
        same(other.read_text(), "precious", "the file")
        expect("exists" in t.say("/save ~"), "the home folder is not refused")
        expect("x/y" in t.say(f"/save {folder}/x/y"), "a file in no folder is not refused")
        expect("wrong.json: messages is" in t.say(f"/load {folder}/wrong.json"), "the file is not named")
        t.say("/save ~/home.json", "Saved")
        (folder / "link").symlink_to(first)
        t.say(f"/load {folder}/link", "Loaded")
        t.say("/clear")
        t.say("/save", "Saved")
        expect((folder / "link").is_symlink(), "a link becomes a file")
        same(read_json(first)["messages"][1:], [], "the file that a link names")
    same(sorted(f.name for f in folder.iterdir() if f.is_file()),
         ["first.json", "home.json", "home.json.new", "link", "other", "wrong.json"], "files")
    same((folder / "home.json.new").read_text(), "precious", "the file")
    same(infer("render", PARROT, stdin=(folder / "home.json").read_bytes()).text + "\n", after, "the file, rendered")


def test_load_in_another_session(folder):
    needs("terminal")
    with play() as t:
        t.say("My name is Ada.", TOLD)
        t.say(f"/save {folder}/name.json", "Saved")
    with play() as t:
        t.say(f"/load {folder}/name.json", "Loaded")
        same(t.say("/prompt"), answered("name", 0) + "\n", "/prompt")
        shown = t.say("What is my name?", TOLD)
        same(before(shown), shown_turn(CONVERSATIONS["name"]["turns"][1]), "the answer")


def test_save_and_load_keep_everything(folder):
    """Tools, a call with its result, reasoning, identity, texts with quotes and control characters."""
    needs("terminal")
    chat = {**conversation("weather", 1), "model_identity": "You are a parrot.", "knowledge_cutoff": "1999-01",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}}
    chat["messages"] += [{"role": "assistant", "content": 'quotes " \\ and\n\ttabs é 😀'},
                         {"role": "user", "content": "Hi"}]
    write_json(folder / "a.json", chat)
    with play() as t:
        t.say(f"/load {folder}/a.json", "Loaded")
        before = t.say("/prompt")
        same(before, infer("render", PARROT, stdin=json.dumps(chat)).text + "\n", "/prompt")
        t.say(f"/save {folder}/b.json", "Saved")
        t.say("/clear")
        t.say(f"/load {folder}/b.json", "Loaded")
        same(t.say("/prompt"), before, "/prompt after /save and /load")
    same(render(read_json(folder / "b.json")), render(chat), "ids")


def test_a_call_survives_save_and_load(folder):
    needs("terminal")
    turn = CONVERSATIONS["weather"]["turns"][0]
    write_json(folder / "a.json", {**conversation("weather", 0), "messages": []})
    with play() as t:
        t.say(f"/load {folder}/a.json", "Loaded")
        shown = t.say(turn["user"], TOLD)
        call = f"tool call: functions.{turn['call']['name']} {turn['call']['arguments']}"
        expect(call in shown, f"shown {shown!r}")
        before = t.say("/prompt")
        expect(before.startswith(turn["prompt"] + turn["completion"]), f"/prompt {before[-200:]!r}")
        t.say(f"/save {folder}/b.json", "Saved")
        t.say(f"/load {folder}/b.json", "Loaded")
        same(t.say("/prompt"), before, "/prompt after /save and /load")


def test_load_without_a_date_keeps_the_session_s(folder):
    needs("terminal")
    (folder / "a.json").write_text('{"messages": []}')
    (folder / "b.json").write_text('{"messages": [], "date": "1999-01-01"}')
    with play() as t:
        for name, date in (("a", DATE), ("b", "1999-01-01")):
            t.say(f"/load {folder}/{name}.json", "Loaded")
            expect(f"Current date: {date}\n" in t.say("/prompt"), f"not {date}")


def test_load_refuses_and_keeps_the_conversation(folder):
    needs("terminal")
    bad = {"empty": b"", "json": b"{", "array": b"[1]", "role": b'{"messages": [{"role": "king"}]}', "bytes": b"\xff",
           "twice": b'{"messages": [], "messages": []}', "effort": b'{"messages": [], "reasoning_effort": "huge"}'}
    with play() as t:
        t.say("Hello!", TOLD)
        for name, text in bad.items():
            (folder / name).write_bytes(text)
            expect("Loaded" not in t.say(f"/load {folder / name}"), f"{name} was loaded")
        os.mkfifo(folder / "fifo")
        expect("regular" in t.say(f"/load {folder / 'fifo'}"), "a FIFO was loaded")
        same(t.say("/prompt"), answered("hello") + "\n", "/prompt")


def test_undo_retry_clear():
    needs("terminal")
    first, second = (shown_turn(turn) for turn in CONVERSATIONS["name"]["turns"])
    with play() as t:
        t.say("My name is Ada.", TOLD)
        t.say("Hello!", TOLD)
        t.say("/undo")
        same(t.say("/prompt"), answered("name", 0) + "\n", "/prompt after /undo")
        same(before(t.say("What is my name?", TOLD)), second, "the answer after /undo")
        same(t.say("/prompt"), answered("name", 1) + "\n", "/prompt after two turns")
        same(before(t.say("/retry", TOLD)), second, "the answer after /retry")
        same(t.say("/prompt"), answered("name", 1) + "\n", "/prompt after /retry")
        t.say("/undo")
        t.say("/undo")
        same(before(t.say("My name is Ada.", TOLD)), first, "the answer after two times /undo")
        t.say("/clear")
        expect("I do not know your name." in t.say("What is my name?", TOLD), "/clear does not forget")
        same(t.say("/prompt"), answered("name_unknown") + "\n", "/prompt after /clear")


FIRST, SECOND = CONVERSATIONS["name"]["turns"]
SIZE = len(SECOND["prompt_ids"]) + 12  # of a context in which the second answer does not fit


PLAN = CONVERSATIONS["preamble"]["turns"][0]


def test_preamble_that_nothing_follows():
    """It is what there is of an answer: on stdout, in --json, and kept in a conversation."""
    limit = next(n for n in range(len(PLAN["completion_ids"])) if "look at" in text_of_ids(PLAN["completion_ids"][:n]))
    limited = ["--max-tokens", limit]
    said = text_of_ids(PLAN["completion_ids"][:limit]).rsplit("<|message|>", 1)[1]
    same(ask("Make a plan.", *limited).text, said + "\n", "stdout")
    same(ask_json("Make a plan.", *limited)["text"], said, "text")
    with play(*limited) as t:
        expect("no answer" not in t.say("Make a plan.", "token limit ·"), "it counts as no answer")
        if not has("terminal"):
            messages = [{"role": "user", "content": "Make a plan."}, {"role": "user", "content": "Hello!"}]
            messages.insert(1, {"role": "assistant", "channel": "commentary", "content": said,
                                "reasoning_content": PLAN["thinking"]})
            size = len(render({"messages": messages, "date": DATE}))
            return same(prompt_size(t.say("Hello!", TOLD)), size, "tokens of the prompt behind it")
        expect(f"<|channel|>commentary<|message|>{said}<|end|>" in t.say("/prompt"), "it is not kept")


CURES = [*["/undo", "/clear"] * has("terminal"), "--ctx"]


def test_context_full():
    """Nothing is dropped silently: one line names the ways out."""
    with play("--ctx", SIZE) as t:
        t.say(FIRST["user"], " tokens · context ")
        shown = t.say(SECOND["user"], "context full ·", "full", *CURES)
        same(len(shown.split("context full ·")[1].strip().splitlines()), 2, "lines, of the statistics one")
        if not has("terminal"):
            return
        same(questions(t), [FIRST["user"], SECOND["user"]], "questions")
        t.say("/undo")
        t.say("/clear")
        expect("I do not know your name." in t.say(SECOND["user"], TOLD), "/clear makes no room")


def test_question_that_does_not_fit():
    long, room = HELLO["user"], len(HELLO["prompt_ids"]) + len(HELLO["completion_ids"])
    while len(prompt := render({"messages": [{"role": "user", "content": long}], "date": DATE})) < room:
        long += " Hello!"
    with play("--ctx", len(prompt) + 3) as t:  # too few for any answer
        t.say("Hello!", " tokens · context ")
        if not has("terminal"):
            t.say(long, "full", *CURES)
            return
        fits = len(prompt) + 2 - (rest := size_of("Hello!", HELLO["answer"], ""))
        asked = size_of("Hello!", HELLO["answer"], long)
        shown = t.say(long, "not asked", f"has {asked - rest} tokens", f"{fits} fit", f"conversation's {rest}", *CURES[1:])
        expect("reading" not in shown, "the line that shows waiting stays")
        same(questions(t), ["Hello!"], "questions")
        same(t.say("Hi", TOLD).count("not asked"), 0, "what fits is asked")
        t.say("/undo", "Taken back")
        expect(shown_turn(HELLO) in t.say("/retry", TOLD), "/retry does not answer")


def test_narrow_window():
    """A question wider than the window arrives whole."""
    with play(*SHORT, columns=30) as t:
        question = "My name is Bob. I live in a house with a garden, at the end of a long road."
        t.send(question)
        t.wait("long road.")
        t.resize(400)  # for the statistics
        shown = t.say("", TOLD)
        same(prompt_size(shown), size_of(question, reasoning_effort="low"), "tokens of the prompt")
        if has("terminal"):
            expect(f"<|message|>{question}<|end|>" in t.say("/prompt"), "the question is not in the prompt")


def test_words_are_not_broken():
    """At 40 columns lines end between words, statistics and help too; the conversation keeps the text as it was."""
    needs("terminal")
    def words(text):
        return text.split()
    with play(columns=40) as t:
        shown = t.say("Show me Unicode.", TOLD).replace("Unicode.\n", "")
        settings = t.say("/set").splitlines()
        expect(all(line.endswith(",") for line in settings[:-1]), f"a setting and its value are apart: {settings}")
        help = "\n".join([t.say("/help"), *settings, t.say("/system Speak of trees, " + "and trees, " * 9)])
        t.say("/system none")
        prompt = t.say("/prompt")
        t.send("\x1b[200~1234567 \tx\x1b[201~\n")
        t.wait(TOLD)
        t.prompt()
        expect("Taken back: 1234567 \tx\n" in t.say("/undo"), "a space before a tab is lost")
    for line in (shown + help).splitlines():
        expect(sum(2 if ord(c) > 0x1100 else 1 for c in line) <= 40, f"a line of {len(line)} columns: {line!r}")
    turn = CONVERSATIONS["unicode"]["turns"][0]
    same(words(before(shown)), words(shown_turn(turn)), "the words")
    same(prompt, answered("unicode") + "\n", "/prompt")


def test_help_fits_the_window():
    needs("terminal")
    for command in ("", "play", "download", "render", *["bench"] * has("commands")):
        with Terminal(*([command] if command else []), "--help", columns=40) as t:
            same(t.ended(), 0, "exit code")
            wide = [line for line in t.text().splitlines() if len(line) > 40 and len(line.split()) > 2]
            expect(not wide, f"{command}: {wide}")


def test_messages_fit_the_window(folder):
    """Lines that go on stand below the text behind the label; what is wrong with files of options is said before loading."""
    needs("terminal")
    def shown(*args, code):
        with Terminal(*args, columns=40) as t:
            same(t.ended(), code, "exit code")
        lines = t.text().splitlines()
        expect(not [line for line in lines if len(line) > 40 and len(line.split()) > 2], f"{args}: {lines}")
        return lines
    lines = shown("play", PARROT, "--temperature", "hot", code=2)
    same(lines, ["infer: --temperature must be 0 to 100,", "       not 'hot'"], "an error")
    for option in (["play", PARROT, "-p", "x", "--schema", "/none/x"],) * has("json") + (["logits", PARROT, "x", "-o", "/none/x"],):
        lines = shown(*option, code=3 if option[0] == "play" else 1)
        expect(lines[0].startswith("infer: /none/x: No such file"), f"{option}: {lines}")
    expect("     id      logit        p  text" in shown("logits", PARROT, "x", "--top", 1, code=0), "logits has no heading")
    if has("commands"):
        (folder / "text").write_text("Hello! " * 40)
        shown("perplexity", PARROT, "-f", folder / "text", code=0)


def test_loading_line_fits_the_window():
    """It and the line that shows the wait are drawn again in place, so the terminal must not wrap them."""
    needs("terminal")
    with play(columns=22) as t:
        t.say("Hello!", TOLD)
    for begin in (b"Loading", b"reading"):
        wrapped = [line for line in re.findall(rb"[^\r\n]*" + begin + rb"[^\r\n]*", t.raw)
                   if not re.search(rb"\x1b\[\?7l[^\r\n]*" + begin + rb"[^\r\n]*\x1b\[\?7h", line)]
        expect(begin in t.raw and not wrapped, f"wrapped: {wrapped}")
    with Terminal("play", PARROT, "-p", "Count.", *SHORT, TERM="dumb") as t:
        same(t.ended(), 0, "exit code")
    expect(b"Loading" in t.raw and b"\x1b" not in t.raw, f"a dumb terminal shows {t.raw!r}")


def test_colour():
    def check(name, env, coloured):
        with play(**env) as t:
            t.say("Hello!", TOLD)
            if has("terminal"):
                t.say("/foo")
        found = re.findall(rb"\x1b\[[\d;]*m", t.raw)
        expect(bool(found) == coloured, f"sequences {found[:5]}")
    each([("colour", {}, True), ("NO_COLOR", {"NO_COLOR": "1"}, False), ("NO_COLOR, empty", {"NO_COLOR": ""}, True),
          ("a dumb terminal", {"TERM": "dumb"}, False)], check)


def test_hidden_thinking():
    with play("--hide-thinking") as t:
        shown = t.say("Hello!", TOLD)
        expect(shown.startswith("Assistant: Hello!") and "greet" not in shown, f"shown {shown!r}")
        if has("terminal"):
            same(t.say("/prompt"), answered("hello") + "\n", "/prompt")


def test_text_of_filters_sends_no_escape_sequences():
    """In a pipe it is exact."""
    text = "\x1b[31mred\x1b]0;title\x07\x9b1m é\n"
    ids = infer("tokenize", PARROT, stdin=text).text
    same(infer("detokenize", PARROT, stdin=ids).text, text, "in a pipe")
    with Terminal("detokenize", PARROT) as t:
        t.wait("reading stdin until its end (Ctrl+D)")
        t.send(ids.strip() + "\n\x04")
        same(t.ended(), 0, "exit code")
        expect("?[31mred?]0;title??1m é\n" in t.text(), f"shown {t.text()!r}")
        expect(not re.search(rb"\x1b\[31m|\x1b\]0;|\xc2\x9b|\x07", t.raw), f"an escape sequence: {t.raw!r}")


def test_filters_mark_control_tokens_in_a_terminal():
    """What is a control token and what only looks like one; a line break ends the text. A pipe gets it as it is."""
    request = json.dumps({"messages": [{"role": "user", "content": "a <|end|>"}], "bare": True})
    exact = "<|start|>user<|message|>a <|end|><|end|><|start|>assistant"
    same(infer("render", PARROT, stdin=request).text, exact, "in a pipe")
    marked = exact.replace("a <|end|>", "a TEXT").replace("<|", "\x1b[7m<|").replace("|>", "|>\x1b[0m").replace("TEXT", "<|end|>")
    for expected, env in (marked, {}), (exact, {"NO_COLOR": "1"}):
        for command, typed in ("render", request), ("detokenize", infer("render", PARROT, "--ids", stdin=request).text.strip()):
            with Terminal(command, PARROT, **env) as t:
                t.wait("reading stdin until its end (Ctrl+D)")
                t.send(typed + "\n\x04")
                same(t.ended(), 0, "exit code")
            expect(t.raw.decode().endswith("\n" + expected + "\r\n"), f"{command} {env} shows {t.raw[-300:]!r}")


def test_loaded_text_sends_no_escape_sequences(folder):
    needs("terminal")
    text = "\x1b[31mred\x1b]0;title\x07\x9b1m" + "é" * 60
    write_json(folder / "a.json", {"messages": [{"role": "system", "content": text}, {"role": "user", "content": text},
                                                {"role": "assistant", "content": text}], "date": DATE})
    with play(NO_COLOR=1) as t:
        before = len(t.raw)
        t.say(f"/load {folder}/a.json")
        for command in ("/prompt", "/system", "/retry", "/undo"):
            t.say(command, *([TOLD] if command == "/retry" else []))
        new = t.raw[before:]
        for sequence in (b"\x1b[31m", b"\x1b]0;", b"\xc2\x9b"):
            expect(sequence not in new, f"{sequence} reaches the terminal: {new[new.find(sequence) - 40:][:80]!r}")
        try:
            new.decode()
        except UnicodeDecodeError as e:
            raise AssertionError(f"characters are cut: {new[max(e.start - 20, 0):e.start + 20]!r}") from None


def test_history(folder):
    """Questions can be called back with the arrow keys, in the next session too; only the user can read them."""
    needs("terminal")
    with play(*SHORT, HOME=folder) as t:
        t.say("My name is Ada.", TOLD)
        t.send("\x1b[A\n")
        t.wait(TOLD)
        t.prompt()
        same(t.say("/prompt").count("<|message|>My name is Ada.<|end|>"), 2, "times the question was asked")
        t.send("/exit\n")
        t.ended()
    files = [f for f in folder.rglob("*") if f.is_file()]
    same([stat.S_IMODE(f.stat().st_mode) for f in files], [0o600], "modes of the files kept")
    with play(*SHORT, HOME=folder) as t:
        t.send("\x1b[A" * 3 + "\n")  # behind it are /prompt and /exit
        expect("My name is Ada.\n" in t.wait(TOLD), "the question is not called back")
        t.prompt()


def test_history_survives_a_kill_and_other_loops(folder):
    """Each line is kept as it is entered; what two loops enter is all there; a text between quotes comes back whole."""
    needs("terminal")
    one, two = play(*SHORT, HOME=folder), play(*SHORT, HOME=folder)
    two.say("/effort high")
    one.send('"""back \\ slash\n')
    one.prompt("...  ")
    one.say('and more"""', TOLD)
    two.say("/effort low")
    for t in (one, two):
        t.process.kill()
        t.process.wait()
        os.close(t.main)
    with play(*SHORT, HOME=folder) as t:
        t.send("\x1b[A\n")
        t.wait("Effort: low")
        t.prompt()
        t.send("\x1b[A" * 2 + "\n")  # behind it: /effort low, once
        t.wait(TOLD)
        t.prompt()
        same(questions(t), ["back \\ slash\nand more"], "the text between quotes")


def test_history_elsewhere_or_nowhere(folder):
    """INFER_HISTORY names another file, /dev/null none; a folder that cannot be written is said to be so."""
    needs("terminal")
    (folder / "file").write_text("")
    mode = os.stat("/dev/null").st_mode
    for place, kept, said in (("mine", True, False), ("/dev/null", False, False), ("file/history", False, True)):
        with play(*SHORT, HOME=folder, INFER_HISTORY=folder / place) as t:
            t.say("/effort low")
            expect(("no history is kept" in t.text()) == said, f"{place}: {t.text()!r}")
        same((folder / place).exists() and "/effort" in (folder / place).read_text(), kept, place)
        same(os.stat("/dev/null").st_mode, mode, "permissions of /dev/null")
    expect(not (folder / ".cache").exists(), "the usual file was made")


def test_a_file_that_is_no_history_stays(folder):
    """It may be somebody's work: it is named, not replaced, and the loop goes on without it."""
    needs("terminal")
    file = folder / ".cache" / "infer" / "history"
    file.parent.mkdir(parents=True)
    file.write_text("my notes\n")
    with play(*SHORT, HOME=folder) as t:
        expect(f"{file} is no history" in t.text(), "the file is not named")
        t.say("/effort high")
        t.send("\x1b[A\n")
        t.wait("Effort: high")
        t.prompt()
    same(file.read_text(), "my notes\n", "the file")


def test_keys():
    """Ctrl+arrows move by words, Tab completes commands, other keys print nothing."""
    needs("terminal")
    with play(*SHORT) as t:
        t.send("one two three\x1b[1;5D\x1b[1;5Dx\x1b[1;5C\x1b[1;5Cy\x1b[5~\x1b[6~\n")
        t.wait(TOLD)
        t.prompt()
        same(questions(t), ["one xtwo threey"], "the line")
        for typed, shown in (("/ef\t", "Effort: low"), ("/co\t", "of 4,096 tokens"), ("/un\t", "Taken back")):
            t.say(typed, shown)
        expect("no command /s;" in t.say("/s\t"), "an ambiguous command is completed")


def test_paste_of_several_lines():
    """It is one question, and comes back from the history as one."""
    needs("terminal")
    with play(*SHORT) as t:
        t.send("Look: \x1b[200~one\r\ttwo é\x1b[31m\n\nthree\n\x1b[201~!\n")
        t.wait(TOLD)
        t.prompt()
        asked = "Look: one\n\ttwo é?[31m\n\nthree!"
        same(questions(t), [asked], "the question")
        t.say("/clear")
        t.send("\x1b[A\x1b[A\x1b[A\n")
        t.wait(TOLD)
        t.prompt()
        same(questions(t), [asked], "the question from the history")
        t.say("/clear")
        t.send('\x1b[200~"""A text"""\rdef f():\x1b[201~\n')  # quotes that were pasted are text
        t.wait(TOLD)
        t.prompt()
        same(questions(t), ['"""A text"""\ndef f():'], "the question with quotes")
        t.say("/clear")
        t.send('"""/clear the table"""\n')  # what stands between quotes is no command
        t.wait(TOLD)
        t.prompt()
        same(questions(t), ["/clear the table"], "the question that begins with a slash")
        t.say("/clear")
        t.send('"""\x1b[200~one\rtwo\x1b[201~\n')  # those that were typed begin a text
        t.send('three"""\n')
        t.wait(TOLD)
        t.prompt()
        same(questions(t), ["one\ntwo\nthree"], "the question between quotes")


def test_paste_during_an_answer():
    """The terminal still puts it in brackets, so it is one question, too."""
    needs("terminal")
    with play(*SHORT) as t:
        t.send("Count.\n")
        t.wait("Assistant: 1")
        expect(brackets(t.raw), "no brackets")
        t.send("\x1b[200~one\r\ttwo\r\x1b[201~\n")
        t.wait(TOLD, TOLD)
        t.prompt()
        same(questions(t), ["Count.", "one\n\ttwo"], "questions")


def test_ctrl_d_during_an_answer_means_nothing():
    needs("terminal")
    with play() as t:
        t.send("Count.\n")
        t.wait("Assistant: 1 2 3")
        t.send("Hel\x04lo!\n\x04")
        t.wait(TOLD, TOLD)
        t.prompt()
        same(questions(t), ["Count.", "Hello!"], "questions")


def test_ctrl_d_leaves_after_one_during_an_answer():
    needs("terminal")
    with play() as t:  # its end sends the second
        t.send("Count.\n")
        t.wait("Assistant: 1 2 3")
        t.send("\x04")
        t.wait(TOLD)
        t.prompt()


def test_ctrl_c_while_the_prompt_is_read():
    """It shows at once, and the loop goes on."""
    with play() as t:
        t.send("~" * 3000 + "\n")
        t.wait("reading 3," if has("terminal") else "~\n")
        t.send("\x03")
        t.wait("^C")
        t.seen = t.text().rfind("\n")  # the line goes when the prompt's step has ended
        t.prompt()
        expect("interrupted" in t.text()[-200:], f"shown {t.text()[-200:]!r}")
        if not has("terminal"):
            size = prompt_size(t.say("Hello!", TOLD))
            return same(size, size_of("~" * 3000, None, "Hello!"), "tokens of the prompt behind it")
        t.say("/undo", "Taken back")
        same(before(t.say("Hello!", TOLD)), shown_turn(HELLO), "the answer")


# Runs the program in a job of its own, as a shell does, and continues it once when it stops.
SHELL = """
import os, signal, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
mode = termios.tcgetattr(0)
child = os.fork()
if not child:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
    termios.tcsetattr(0, termios.TCSANOW, mode)
    print("stopped", flush=True)
    os.tcsetpgrp(0, child)
    os.killpg(child, signal.SIGCONT)
    os.waitpid(child, 0)
"""


def brackets(raw):
    """Does the terminal put pasted text in brackets?"""
    return raw.rfind(b"\x1b[?2004h") > raw.rfind(b"\x1b[?2004l")


def test_ctrl_z_suspends():
    with Terminal("-c", SHELL, CHECKED, "play", PARROT, *GREEDY, program=sys.executable) as t:
        t.ready()
        t.send("Hel")
        t.wait("Hel")
        t.send("\x1a")
        t.wait("stopped")
        if not has("terminal"):  # the terminal forgets the line
            shown = t.say("Hello!", "Assistant: Hello!", TOLD)
            return same(prompt_size(shown), size_of("Hello!"), "tokens of the prompt")
        t.wait("Hel")
        same([brackets(part) for part in t.raw.split(b"stopped")], [False, True], "brackets before and behind it")
        t.send("lo!\n")
        t.wait("Assistant: Hello!", TOLD)
        t.prompt()
        same(questions(t), ["Hello!"], "the line")


def test_ctrl_z_during_an_answer():
    """Typed text stays hidden behind it, and is the next line."""
    with Terminal("-c", SHELL, CHECKED, "play", PARROT, *GREEDY, program=sys.executable) as t:
        t.ready()
        t.send("Count.\n")
        t.wait("Assistant: 1 2 3")
        t.send("\x1a")
        t.wait("stopped")
        if not has("terminal"):  # where typed text shows
            t.send("Hello!\n")
            shown = t.wait("Assistant: Hello!", TOLD) + t.prompt()
            return same(prompt_size(shown), size_of("Count.", COUNT["answer"], "Hello!"), "tokens of the prompt")
        limit = time.monotonic() + t.seconds
        while not termios.tcgetattr(t.main)[3] & termios.NOFLSH:  # the loop sets it when it hides what is typed
            expect(time.monotonic() < limit, "what is typed is not hidden again")
            t.read(0.01)
        t.send("Hello!")
        expect("Hello" not in t.wait(TOLD), "typed text shows in the answer")
        t.send("\n")
        t.wait("Assistant: Hello!", TOLD)
        same([brackets(part) for part in t.raw.split(b"stopped")], [False, True], "brackets before and behind it")
        t.prompt()
        same(questions(t), ["Count.", "Hello!"], "questions")


def test_ways_out():
    needs("terminal")
    for word in ("/bye", "/quit", "/exit"):
        with play() as t:
            t.send(word + "\n")
            same(t.ended(), 0, "exit code")


def test_turns_are_apart():
    """A blank line behind each turn; the statistics are dim."""
    with play() as t:
        expect(t.say("Hello!", TOLD).endswith("]\n\n"), "no blank line")
        expect(re.search(rb"\x1b\[2m\[[\d.]+ tokens/s", t.raw), "the statistics are not dim")


def test_loop_without_chat_format(folder):
    model = letters_model(folder)
    with Terminal("play", model, *GREEDY, "--max-tokens", 3) as t:
        t.wait("no chat format")
        t.ready()
        text = "".join(chr(0x4e00 + i) for i in (1, 2, 3))
        same([prompt_size(t.say(text, TOLD)) for _ in range(2)], [3, 9], "tokens of the prompts")
        if not has("terminal"):
            return
        t.say("/clear")
        for command in ("/system x", "/effort low"):
            expect("chat format" in t.say(command), command)
        same(t.say("/undo"), "there is no question yet\n", "/undo")
        t.send("/exit\n")
        same(t.ended(), 0, "exit code")


# ---- finding models

FOUND = None
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_model(hub, repository, commit=COMMIT):
    """The parrot as tools of the hub leave it: files are links to blobs."""
    folder = hub / ("models--" + repository.replace("/", "--"))
    blobs, snapshot = folder / "blobs", folder / "snapshots" / commit
    for d in (blobs, snapshot, folder / "refs"):
        d.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for i, file in enumerate(sorted(PARROT.iterdir())):
        if not (blobs / str(i)).exists():
            (blobs / str(i)).symlink_to(file)
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    return snapshot


def home_with_models(folder):
    """A home with org/parrot in the hub's cache, and a working folder with models/tiny."""
    home, work = folder / "home", folder / "work"
    hub_model(home / ".cache" / "huggingface" / "hub", "org/parrot")
    copy_model(PARROT, work / "models", name="tiny")
    return home, work


def test_model_list_and_selector(folder):
    home, work = home_with_models(folder)
    if not has("commands"):  # the models are named, and nothing is asked
        copy_model(PARROT, work / "models", name="red\x1b[31m")
        with Terminal("play", cwd=work, HOME=home) as t:
            same(t.ended(), 2, "exit code of several models")
            expect(all(name in t.text() for name in ("models/tiny", "org/parrot", "models/red?[31m")), t.text())
            expect(b"\x1b[31mred" not in t.raw and b"red\x1b" not in t.raw, f"an escape sequence: {t.raw}")
        return
    with Terminal("play", *GREEDY, cwd=work, HOME=home) as t:
        shown = t.wait("Select model (1-2): ")
        lines = [rf" +{i}\. {name} +774 kB +gpt_oss +MXFP4 +complete\n" for i, name in ((1, "models/tiny"), (2, "org/parrot"))]
        expect(re.search("Available models:\n" + "".join(lines), shown), f"shown {shown!r}")
        for wrong in ("0", "3", "-1", "x", "", "1x", "1.5", "99999999999999999999", "1 2"):
            t.send(wrong + "\n")
            t.wait("A number from 1 to 2", "Select model (1-2): ")
        t.send("2\n")
        t.ready()
        expect(shown_turn(HELLO) in t.say("Hello!", TOLD), "the model does not answer")
    with Terminal("play", cwd=work, HOME=folder) as t:
        expect("Select" not in t.wait("✓ ", "context 4,096"), "the only model is not taken at once")
        t.ready()
    with Terminal("play", cwd=work, HOME=home) as t:
        t.wait("Select model (1-2): ")
        t.send("\x04")
        same(t.ended(), 2, "exit code without a selection")
        expect("): \ninfer: which" in t.text(), "the message does not begin a line")
    with Terminal("play", cwd=work, HOME=home) as t:
        t.wait("Select model (1-2): ")
        t.send("\x03")
        expect(t.ended() in (130, -2), "Ctrl+C does not end the selection")
    copy_model(PARROT, work / "models", name="red\x1b[31m")
    for command, code in (*[("list", 0)] * has("commands"), ("play", 2)):  # escape sequences in a folder's name have no effect
        with Terminal(command, cwd=work, HOME=home) as t:
            t.wait("models/red?[31m")
            t.send("\x04")
            same(t.ended(), code, "exit code")
            expect(b"\x1b[31m" not in t.raw, f"{command}: {t.raw}")


def test_models_are_found(folder):
    home, work = home_with_models(folder)
    elsewhere = folder / "elsewhere"
    hub_model(elsewhere / "hub", "other/bird")
    (work / "models" / "org--link").symlink_to(PARROT)
    broken = home / ".cache" / "huggingface" / "hub" / "models--org--parrot-broken"
    (broken / "snapshots" / COMMIT).mkdir(parents=True)
    hub, cache = {"HF_HOME": elsewhere}, {"HF_HUB_CACHE": elsewhere / "hub"}
    cases = [("full name", "org/parrot", {}, FOUND), ("part of a name", "org/parr", {}, FOUND),
             ("other letters", "ORG/PARROT", {}, FOUND), ("below models", "models/tiny", {}, FOUND),
             ("part of models", "tiny", {}, FOUND), ("a link", "org/link", {}, FOUND), ("a path", PARROT, {}, FOUND),
             ("HF_HOME", "bird", hub, FOUND), ("HF_HUB_CACHE", "bird", cache, FOUND),
             ("two that fit", "org/", {}, ["org/link", "org/parrot"]),
             ("none that fits", "zebra", {}, ["org/link", "org/parrot", "models/tiny"]),
             ("not in the other cache", "org/parrot", hub, ["other/bird"])]

    def check(name, model, env, near):
        how = {"cwd": work, "env": {"HOME": home, **env}}
        if near is FOUND:
            same(infer("play", model, "-p", "Hello!", *GREEDY, **how).text, HELLO["answer"] + "\n", "stdout")
        else:
            refused("play", model, "-p", "Hello!", words=near, **how)
    each(cases, check)
    r = infer("play", "-p", "x", cwd=work, env={"HOME": home}, code=2)
    expect(all(m in r.err for m in ("org/parrot", "org/link", "models/tiny")), f"stderr {r.err!r}")
    expect("broken" not in r.err, f"a snapshot without files is listed: {r.err!r}")
    copy_model(FIXTURES / "odd", work / "models", name="half")  # has no tokenizer.json
    lines = infer("play", "-p", "x", cwd=work, env={"HOME": home}, code=2).err.splitlines()
    if has("commands"):
        same([line.split()[1] for line in lines if line.endswith("incomplete")], ["models/half"], "incomplete models")
    expect(any("models/half" in line for line in lines), "an incomplete model is not listed")
    same(infer("play", "-p", "Hello!", *GREEDY, cwd=folder, env={"HOME": folder, "HF_HOME": elsewhere}).text,
         HELLO["answer"] + "\n", "the only model there is")


def test_main_names_the_snapshot(folder):
    """Of two snapshots the one that refs/main names is played."""
    hub = folder / "hub"
    old = hub_model(hub, "org/parrot", "f" * 40)
    hub_model(hub, "org/parrot")
    (old / "config.json").unlink()
    (old / "config.json").write_text("{}")
    same(infer("play", "org/parrot", "-p", "Hello!", *GREEDY, cwd=folder, env={"HF_HUB_CACHE": hub}).text,
         HELLO["answer"] + "\n", "stdout")


def test_a_loop_of_lines():
    """Without terminal/ a line is a question; Ctrl+C at the prompt spoils none."""
    if has("terminal"):
        raise Skip("is for a build without terminal/")
    with play() as t:
        t.say("")
        for _ in range(50):  # each as early as it can come
            t.interrupt()
        t.say("Hello!", "Assistant: ", TOLD)
        shown = t.say("/help", "Assistant: ", TOLD)
        same(prompt_size(shown), size_of("Hello!", HELLO["answer"], "/help"), "tokens of the prompt")
        t.send(b"a\xff\n")
        expect("UTF-8" in t.prompt(), "bytes that are no text are not refused")
