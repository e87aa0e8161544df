"""Chat formats other than harmony: prompts equal those of the published templates, text never becomes a control token, and
answers become thoughts, text and calls. Each format runs with the parrot's vocabulary and the model's control tokens."""
import json
import tarfile
from array import array

from test_prompt import message, parse

from helpers import (GOLDENS, PARROT, PLAIN, Skip, copy_model, data, each, expect, ids_of, infer, read_json, refused, render,
                     safetensors, same, write_json)

NEEDS = ("formats", "families")  # rooms

MODELS = {m["model"]: m for m in read_json(GOLDENS / "chat.json")}


def folder_of(model, folder, template=None):
    """A model folder with the parrot's vocabulary; without `template` the chat template has what tells it apart."""
    m = MODELS[model]
    made = folder / model.replace(" ", "_")
    made.mkdir(exist_ok=True)
    tokenizer = read_json(PARROT / "tokenizer.json")
    first = min(t["id"] for t in tokenizer["added_tokens"])
    tokenizer["added_tokens"] = [{**tokenizer["added_tokens"][0], "id": first + i, "content": name,
                                  "special": True} for i, name in enumerate(m["controls"])]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template or m["has"]}))
    return made


def speaker(model, folder, *texts):
    """A model that answers with these texts, each a token, the last of which ends the answer. None may come twice or
    end a prompt. model None: one that speaks harmony. All weights are zero but the embedding, where each token is a dimension, and the head, where a token
    follows the one before it."""
    made = folder_of(model, folder) if model else copy_model(PARROT, folder, keep_weights=False)
    tokenizer = read_json(made / "tokenizer.json")
    ids, size = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}, 448
    next_id = max(ids.values()) + 1
    for token in tokenizer["added_tokens"]:  # as Qwen publishes them
        token["special"] = not token["content"].endswith(("tool_call>", "think>"))
    ids |= {text.replace("Ġ", " ").replace("Ċ", "\n"): token for text, token in tokenizer["model"]["vocab"].items()}
    for text in texts:
        if text not in ids:
            ids[text], next_id = next_id, next_id + 1
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": ids[text], "content": text,
                                              "special": False})
    write_json(made / "tokenizer.json", tokenizer)

    def matrix(rows, columns, *places):
        values = array("f", bytes(4 * rows * columns))
        for row, column, value in places:
            values[row * columns + column] = value
        return [rows, columns], values.tobytes()
    said = [ids[text] for text in texts]
    ones = [size], array("f", [1] * size).tobytes()
    tensors = {"model.embed_tokens.weight": matrix(size, size, *((i, i, 1) for i in range(size))),
               "lm_head.weight": matrix(size, size, *((said[0], i, 2) for i in range(size)),
                                        *((token, before, 4) for before, token in zip(said, said[1:]))),
               "model.norm.weight": ones}
    layer = "model.layers.0."
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = ones
    for name, rows, columns in [("self_attn." + x, 64, size) for x in ("q_proj", "k_proj", "v_proj")] + [
            ("self_attn.o_proj", size, 64), ("mlp.gate_proj", 64, size), ("mlp.up_proj", 64, size),
            ("mlp.down_proj", size, 64)]:
        tensors[f"{layer}{name}.weight"] = matrix(rows, columns)
    header, content = {}, b""
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(content), len(content) + len(values)]}
        content += values
    (made / "model.safetensors").write_bytes(safetensors(header, content))
    write_json(made / "config.json", {
        "model_type": "llama", "vocab_size": size, "hidden_size": size, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000, "max_position_embeddings": 2048, "eos_token_id": said[-1], "torch_dtype": "float32"})
    return made


LOOKS_LIKE_CALLS = [  # model, tokens of its answer, the text
    ("Qwen2.5", ["I look.\n", "<tool_call>", '\n{"name": "f", "arguments": {"a":1}}\n', "</tool_call>", "<|im_end|>"],
     'I look.\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'),
    ("Llama 3.1", ['{"name": "f", "parameters": {"a":1}}', "<|eot_id|>"], '{"name": "f", "parameters": {"a":1}}'),
    ("Mistral v0.3", ["[TOOL_CALLS]", ' [{"name": "f", "arguments": {"a":1}', "}]", "</s>"],  # the mark has no text
     '[{"name": "f", "arguments": {"a":1}}]')]


def all_cases():
    return [(f"{name}: {case['name']}", (name, case)) for name, m in MODELS.items() for case in m["cases"]]


def test_prompts_are_the_templates(folder):
    """The text, and the ids of the whole text: control tokens where the template has them, nothing cut elsewhere."""
    folders = {name: folder_of(name, folder) for name in MODELS}
    cases = all_cases()
    same(len(cases), sum(len(m["cases"]) for m in MODELS.values()), "number of cases")

    def check(name, value):
        model, case = value
        prompt = json.dumps(case["conversation"])
        same(infer("render", folders[model], stdin=prompt).text, case["text"], "prompt")
        if "control tokens" not in case["name"]:
            ids = ids_of(infer("tokenize", folders[model], "--special", stdin=case["text"]))
            same(render(case["conversation"], folders[model]), ids, "ids")
    each(cases, check)


def test_published_templates_are_known(folder):
    """The whole template where the other tests have its decisive texts; and as chat_template.jinja."""
    templates = data("chat_templates")

    def check(name, m):
        made = folder_of(name, folder, (templates / m["file"]).read_text())
        case = m["cases"][2]
        same(infer("render", made, stdin=json.dumps(case["conversation"])).text, case["text"], "prompt")
        (made / "tokenizer_config.json").write_text("{}")
        (made / "chat_template.jinja").write_bytes((templates / m["file"]).read_bytes())
        same(infer("render", made, stdin=json.dumps(case["conversation"])).text, case["text"], "prompt")
    each([(name, m) for name, m in MODELS.items() if m["file"]], check)


def test_ids_of_published_tokenizers(folder):
    """Each prompt has the ids that the `tokenizers` library gives the template's text."""
    with tarfile.open(data("families.tar.xz")) as archive:
        archive.extractall(folder, [m for m in archive if m.name.startswith("tokenizers/")])

    refused = set()

    def check(name, m):
        made = folder / "tokenizers" / m["tokenizer"]
        (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": m["has"]}))
        if infer("tokenize", made, code=None, program=PLAIN).code:
            refused.add(m["tokenizer"])
            return
        for case in m["cases"]:
            if "ids" in case:
                same(render(case["conversation"], made, PLAIN), case["ids"], case["name"])
    each([(name, m) for name, m in MODELS.items() if m["tokenizer"]], check)
    if refused:
        raise Skip(f"tokenizers that are not supported: {', '.join(sorted(refused))}; the others agree")


def test_text_never_becomes_control_tokens(folder):
    """All names of control tokens in every field: as many control tokens as without them."""
    first = 400

    def fill(value, text):
        if isinstance(value, dict):
            return {k: fill(v, text) if k in ("content", "description", "arguments", "tools", "messages", "function",
                                              "tool_calls", "reasoning_content") else v for k, v in value.items()}
        return [fill(v, text) for v in value] if isinstance(value, list) else text if isinstance(value, str) else value

    def check(name, value):
        model, case = value
        made = folder_of(model, folder)
        counts = []
        for text in ("x", "".join(MODELS[model]["controls"])):
            ids = render(fill(case["conversation"], text), made)
            counts.append(sum(i >= first for i in ids))
        same(counts[1], counts[0], "number of control tokens")
    each([c for c in all_cases() if "thoughts" not in c[0] or "call" in c[0]], check)


def test_bytes_of_a_template_never_become_tokens(folder):
    """ChatML's own system text stands in the prompt, unless it is not UTF-8."""
    made = folder_of("SmolLM2", folder)
    template = MODELS["SmolLM2"]["has"].encode().replace(b"You are", b"\xff403;\xff99999999;You are")
    (made / "chat_template.jinja").write_bytes(template)
    text = infer("render", made, stdin=json.dumps({"messages": [{"role": "user", "content": "Hi"}]})).text
    same(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "prompt")


def test_system_text_of_a_template(folder):
    """Mistral Small's own, with the date; nothing of a template that ends in another way, and no date where there is none."""
    before = "{%- set default_system_message = "
    behind = "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}{{- '[INST]' + message['content'] + '[/INST]' }}"
    today = "Today is 2025-06-28."

    def check(name, value):
        text, date, expected = value
        made = folder_of("Mistral Small 3", folder, before + text + behind)
        prompt = infer("render", made, stdin=json.dumps({"messages": [{"role": "user", "content": "Hi"}], "date": date})).text
        same(prompt, "<s>" + (expected and f"[SYSTEM_PROMPT]{expected}[/SYSTEM_PROMPT]") + "[INST]Hi[/INST]", "prompt")
    each([("date", ('"Today is " + today + "." %}', "2025-06-28", today)),
          ("other end of a tag", ('"Today is " + today + "." -%}', "2025-06-28", today)),
          ("no date", ('"Today is " + today + "." %}', "none", "Today is .")),
          ("escapes", ('"a\\n\\"b\\"" %}', "2025-06-28", 'a\n"b"')),
          ("control tokens", ('"[INST]" %}', "2025-06-28", "[INST]")),
          ("not closed", ('"Today is %}', "2025-06-28", "")),
          ("another name", ('"Today is " + tools + "." %}', "2025-06-28", ""))], check)


def test_other_strings_of_templates(folder):
    """A line break in front of ChatML's own system text; a fixed date in single quotes; nothing of what is no string."""
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "date": "2025-06-28"})

    def check(name, value):
        model, (before, behind), word, there = value
        template = MODELS[model]["has"]
        expect(before in template, f"the test is wrong: no {before!r}")
        prompt = infer("render", folder_of(model, folder, template.replace(before, behind)), stdin=chat).text
        same(word in prompt, there, f"{word!r} in {prompt!r}")
    each([("a line break before", ("SmolLM2", ("'<|im_start|>system", "'\\n<|im_start|>system"), "named SmolLM", True)),
          ("raw text", ("SmolLM2", ("{{ '<|im_start|>system\nYou are", "<|im_start|>system\n{{ messages[0]['content'] }} You are"), "You are", False)),
          ("single quotes", ("Llama 3.1", ('"26 Jul 2024"', "'26 Jul 2024'"), "26 Jul 2024", True)),
          ("another date", ("Llama 3.1", ('"26 Jul 2024"', "'1 Jan 2025'"), "Today Date: 1 Jan 2025", True))], check)


def test_chatml_behind_bos_token(folder):
    """As the templates of Hermes 3 and Bielik have it, also where other texts do not begin so. jinja prints nothing for
    a bos_token that the tokenizer lacks."""
    made = folder_of("SmolLM2", folder)
    template = ("{{bos_token}}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
                "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    chat = json.dumps({"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]})
    text = "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"

    def check(name, config, first):
        (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
        same(infer("render", made, stdin=chat).text, first + text, "prompt")
    each([("of every text", {"bos_token": "<|endoftext|>", "add_bos_token": True}, "<|endoftext|>"),
          ("of chats", {"bos_token": "<|endoftext|>", "add_bos_token": False}, "<|endoftext|>"),
          ("none", {"add_bos_token": False}, "")], check)


THOUGHT, HI = message("A", "analysis"), message("Hi", "final")


def called(name="f", arguments="{}"):
    return message(arguments, "commentary", recipient=f"functions.{name}", content_type="<|constrain|>json")


STREAMS = [  # model, what it writes, the messages, whether something had to be repaired
    ("Qwen3", "<think>\nA\n</think>\n\nHi<|im_end|>", [THOUGHT, HI], False),
    ("Qwen3", "Hi<|im_end|>", [HI], False),
    ("Qwen3", "Hi", [HI], False),
    ("Qwen3", "<think>\n\n</think>\n\nHi<|im_end|>", [HI], False),
    ("Qwen3", "<think>A", [THOUGHT], False),
    ("Qwen3", "A</think>Hi<|im_end|>", [THOUGHT, HI], True),
    ("Qwen3", "<think>A</think>H</think>i<|im_end|>", [THOUGHT, HI], True),
    ("Qwen3", "a < b <think>c<|im_end|>", [message("a < b <think>c", "final")], False),
    ("Qwen3", "  Hi \n<|endoftext|>", [HI], False),
    ("Qwen3", "Hi<|im_start|>", [HI], False),
    ("Qwen3", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":[1,{}]}}\n</tool_call><|im_end|>",
     [called("f", '{"a": [1, {}]}')], False),
    ("Qwen3", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"1\":9007199254740993,\"x\": 1.0}}\n</tool_call><|im_end|>",
     [called("f", '{"1": 9007199254740993, "x": 1.0}')], False),
    ("Qwen3", "<think>A</think>Hi\n<tool_call>{\"name\":\"f\"}</tool_call>\n<tool_call>{\"name\":\"g\"}</tool_call>"
     "<|im_end|>", [THOUGHT, message("Hi", "commentary"), called(), called("g")], False),
    ("Qwen3", "<tool_call>{\"name\":\"f\"}<|im_end|>", [called()], True),
    ("Qwen3", "<tool_call>{name: f}</tool_call><|im_end|>", [message("<tool_call>{name: f}</tool_call>", "final")], True),
    ("Qwen3", "<tool_call>{\"name\": \"f g\"}</tool_call><|im_end|>",
     [message("<tool_call>{\"name\": \"f g\"}</tool_call>", "final")], True),
    ("Qwen3", "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call><|im_end|>",
     [message("<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "final")], True),
    ("Qwen2.5", "<think>A</think>Hi<|im_end|>", [message("<think>A</think>Hi", "final")], False),
    ("SmolLM2", "<tool_call>{\"name\":\"f\"}</tool_call><|im_end|>",
     [message("<tool_call>{\"name\":\"f\"}</tool_call>", "final")], False),
    ("DeepSeek R1", "A\n</think>\n\nHi<｜end▁of▁sentence｜>", [THOUGHT, HI], False),
    ("DeepSeek V3.1", "A</think>Hi<｜end▁of▁sentence｜>", [THOUGHT, HI], False),
    ("Llama 3.1", "{\"name\": \"f\", \"parameters\": {\"x\": 1}}<|eot_id|>", [called("f", '{"x": 1}')], False),
    ("Llama 3.1", "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}<|eom_id|>", [called()], False),
    ("Llama 3.1", "{ \"name\": \"f\",\n \"parameters\": {}}<|eot_id|>", [called()], False),
    ("Llama 3.1", "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}<|eot_id|>", [called()], False),
    ("Llama 3.1", "{\"name\": \"Bern\", \"size\": 1}, {}<|eot_id|>", [message('{"name": "Bern", "size": 1}, {}', "final")], False),
    ("Llama 3.1", "{\"name\": \"Bern\", \"size\": 1}<|eot_id|>", [message('{"name": "Bern", "size": 1}', "final")], False),
    ("Llama 3.1", "As JSON: {\"name\": \"f\"}<|eot_id|>", [message('As JSON: {"name": "f"}', "final")], False),
    ("Mistral v0.3", "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}, \"id\": \"abcdefghi\"}]</s>",
     [called("f", '{"x": 1}')], False),
    ("Mistral v0.3", "Hi[TOOL_CALLS] [{\"name\": \"f\"}, {\"arguments\": {\"}\": \"\\\"}{\"}, \"name\": \"g\"}]</s>",
     [message("Hi", "commentary"), called(), called("g", '{"}": "\\"}{"}')], False),
    ("Mistral Nemo", "[TOOL_CALLS][{\"name\": \"f\"},{\"name\": \"g\"}]", [called(), called("g")], False),
    ("Mistral Nemo", "[TOOL_CALLS][{\"name\": \"f\"}, {\"na</s>", [called(), message(", {\"na", "final")], True),
    ("Mistral Nemo", "[TOOL_CALLS][{\"a\": {}}, {\"name\": \"f\"}]</s>",
     [message("[{\"a\": {}}, {\"name\": \"f\"}]", "final")], True),
    ("Mistral Nemo", "[TOOL_CALLS]Hi</s>", [HI], True),
    ("Mistral Nemo", "Hi\u00a0[TOOL_CALLS][{\"name\": \"f\"}]</s>", [message("Hi", "commentary"), called()], False),
    ("Llama 2", " Hi </s>", [HI], False),
    ("Gemma 3", "Hi<end_of_turn>\n", [HI], False),
]


def test_answers_are_read(folder):
    """Marks are tokens of their own; where the model spells them out they are text."""
    def check(name, value):
        model, text, messages, repaired = value
        made = folder_of(model, folder)
        ids = ids_of(infer("tokenize", made, "--special", stdin=text))
        found, err = parse(ids, made)
        same(found, messages, "messages")
        expect(("repair" in err) == repaired, f"stderr: {err!r}")
    each([(f"{model}: {text}", (model, text, *rest)) for model, text, *rest in STREAMS], check)
    spelled = "<think>A</think> <tool_call>{\"name\":\"f\"}</tool_call>"
    qwen = folder_of("Qwen3", folder)
    same(parse(ids_of(infer("tokenize", qwen, stdin=spelled)), qwen)[0], [message(spelled, "final")], "marks as text")


def test_results_that_name_their_function(folder):
    """A result with harmony's name of a function, empty too, is a result like any other; a user's is the user's text."""
    case = next(c["conversation"] for c in MODELS["Qwen3"]["cases"] if c["name"] == "two calls")
    named = [{**m, "name": "functions.f", "content": ""} if m["role"] == "tool" else m for m in case["messages"]]
    unnamed = [{**m, "content": ""} if m["role"] == "tool" else m for m in case["messages"]]
    users = [{**m, "recipient": "functions.f"} if m["role"] == "user" else m for m in unnamed]
    for model in ("Qwen3", "Llama 3.1"):
        made = folder_of(model, folder)
        expected = render({**case, "messages": unnamed}, made)
        same(render({**case, "messages": named}, made), expected, "results with names")
        same(render({**case, "messages": users}, made), expected, "users with recipients")


def test_arguments_may_be_empty(folder):
    """As some clients send those of a function that has none."""
    def prompt(model, arguments):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return render({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]},
                      folder_of(model, folder))
    for model in ("Qwen3", "Llama 3.1", "Mistral Nemo"):
        same(prompt(model, ""), prompt(model, "{}"), model)


def test_what_a_format_has_no_words_for(folder):
    question = {"messages": [{"role": "user", "content": "Hi"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    without = folder_of("Mistral Small 3", folder, MODELS["Mistral v0.3"]["has"])  # no tokens for calls
    for made in (without, *(folder_of(model, folder) for model in ("SmolLM2", "Gemma 3", "Llama 2"))):
        refused("render", made, stdin=json.dumps({**question, "tools": tools}), code=2, words=["tools"])
    refused("render", folder_of("Qwen3", folder), stdin=json.dumps({**question, "response_format": schema}), code=2,
            words=["response_format"])
    for nobody in ([{"role": "assistant", "content": "Hi"}], [{"role": "system", "content": "Be brief."}]):
        for model in ("Llama 3.1", "Mistral v0.3"):
            refused("render", folder_of(model, folder), stdin=json.dumps({"messages": nobody, "tools": tools}), code=2,
                    words=["user's text", "tools"])
    for made in (PARROT, folder_of("DeepSeek R1", folder)):
        refused("render", made, stdin=json.dumps({**question, "reasoning_effort": "none"}), code=2, words=["effort"])


def test_turns_alternate(folder):
    """Where the template refuses other turns, they are refused in its name; nowhere else. Two texts of the user in a
    row, as after an interrupted answer, are one turn."""
    user, assistant = {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}
    later = {"role": "system", "content": "C"}

    def check(name, messages, turn):
        chat = json.dumps({"messages": messages})
        for model in ("Gemma 2", "Gemma 3", "Llama 2", "Mistral v0.1", "Mistral v0.2, old", "Mistral v0.3", "Mistral Nemo"):
            refused("render", folder_of(model, folder), stdin=chat, code=2,
                    words=[MODELS[model]["format"], f"turn {turn}"])
        for model in ("SmolLM2", "Qwen3", "Llama 3.1", "DeepSeek R1", "TinyLlama"):
            infer("render", folder_of(model, folder), stdin=chat)
    each([("an answer first", [assistant, user], 1),
          ("two answers", [user, assistant, assistant, user], 3), ("a system text later", [user, assistant, later, user], 3),
          ("two system texts", [later, later, user], 1)], check)
    function = {"name": "f", "arguments": "{}"}
    called = [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
              {"role": "tool", "tool_call_id": "a", "content": "7"}]
    for unanswered in (called, called[:1]):  # as after an interrupted answer
        infer("render", folder_of("Mistral v0.3", folder), stdin=json.dumps({"messages": [user, *unanswered, user]}))
    beside = [message("A", "commentary"), message("B", "analysis")]
    same(*(render({"messages": [user, *m, *called]}, folder_of("Mistral v0.3", folder)) for m in ([], beside)), "text beside")
    both = {"role": "user", "content": "D\nE"}
    for model in ("Gemma 2", "Llama 2", "Mistral v0.3"):
        for before in ([], [later], [later, user, assistant]):
            one, two = ({"messages": before + m} for m in ([both], [both | {"content": x} for x in "DE"]))
            same(*(infer("render", folder_of(model, folder), stdin=json.dumps(c)).text for c in (two, one)), model)


def test_models_without_a_known_format(folder):
    """Which reason is given."""
    def check(name, template, word):
        made = folder_of("SmolLM2", folder, template)
        refused("render", made, stdin="{}", code=3, words=["no chat format", word])
    each([("none", " ", "no known format"), ("another", "{% for m in messages %}<|im_start|>{{ m }}{% endfor %}", "SmolLM2"),
          ("another end of thoughts", MODELS["DeepSeek V3.1"]["has"] + " '<think></think>'", "no known format"),
          ("thinks otherwise", MODELS["SmolLM2"]["has"] + "{# enable_thinking #}", "no known format")], check)
    made = folder_of("SmolLM2", folder)
    (made / "tokenizer_config.json").write_text("{}")
    refused("render", made, stdin="{}", code=3, words=["no chat template"])
    (made / "tokenizer_config.json").write_text("{")
    refused("render", made, stdin="{}", code=3, words=["tokenizer_config.json"])
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": [
        {"name": "tool_use", "template": "x"}, {"name": "default", "template": MODELS["SmolLM2"]["has"]}]}))
    case = MODELS["SmolLM2"]["cases"][0]
    same(infer("render", made, stdin=json.dumps(case["conversation"])).text, case["text"], "prompt")
    (made / "tokenizer_config.json").write_text("{}")
    (made / "chat_template.json").write_text(json.dumps({"chat_template": MODELS["SmolLM2"]["has"]}))
    same(infer("render", made, stdin=json.dumps(case["conversation"])).text, case["text"], "prompt by chat_template.json")
