"""Chat formats other than harmony: what templates read, where they stand, and answers that become thoughts, text and calls.
Each format runs with the parrot's vocabulary and the model's control tokens. templates.c checks prompts and their ids."""
import json
import re
from array import array

from test_prompt import message, parse

from helpers import (DATA, DATE, GOLDENS, PARROT, PLAIN, TESTS, copy_model, data, each, expect, has, ids_of, infer, read_json, refused,
                     render, safetensors, same, write_json)

NEEDS = ("formats", "families")  # rooms

MODELS = {m["model"]: m for m in read_json(GOLDENS / "chat.json")}


def template_of(model):
    """The model's chat template. Skips the test if it is a stored one that is not here."""
    m = MODELS[model]
    text = m["template"] if m["template"] is not None else (data("chat_templates") / m["file"]).read_text()
    for before, behind in m["changes"]:
        text = text.replace(before, behind)
    return text


def models_here():
    """Those whose template is here: all of them with TEST_DATA."""
    stored = (DATA / "chat_templates").exists()
    return {name: m for name, m in MODELS.items() if stored or m["template"] is not None}


def folder_of(model, folder, template=None):
    """A model folder with the parrot's vocabulary, the model's control tokens, and its chat template or `template`."""
    m = MODELS[model]
    made = folder / re.sub("[ /]", "_", model)
    made.mkdir(exist_ok=True)
    tokenizer = read_json(PARROT / "tokenizer.json")
    first = min(t["id"] for t in tokenizer["added_tokens"])
    tokenizer["added_tokens"] = [{**tokenizer["added_tokens"][0], "id": first + i, "content": name,
                                  "special": True} for i, name in enumerate(m["controls"])]
    write_json(made / "tokenizer.json", tokenizer)
    write_json(made / "tokenizer_config.json", {"chat_template": template or template_of(model), **m["special"]})
    return made


def speaker(model, folder, *texts, template=None):
    """A model that answers with these texts, each a token, the last of which ends the answer. None may come twice or
    end a prompt. model None: one that speaks harmony. All weights are zero but the embedding, where each token is a dimension, and the head, where a token
    follows the one before it."""
    made = folder_of(model, folder, template) if model else copy_model(PARROT, folder, keep_weights=False)
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


def test_templates_in_files(folder):
    """chat_template.jinja counts before the others; another one is used for prompts with tools; --chat-template FILE
    before all."""
    made = folder_of("SmolLM2", folder, "in the config")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]

    def prompts(*options):
        return [infer("render", made, *options, stdin=json.dumps(c)).text for c in (chat, {**chat, "tools": tools})]
    same(prompts(), ["in the config"] * 2, "tokenizer_config.json")
    write_json(made / "tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "{{ tools[0].function.name }}"},
                                                                  {"name": "default", "template": "a list"}]})
    same(prompts(), ["a list", "f"], "a list")
    (made / "chat_template.jinja").write_text("a file")
    same(prompts(), ["a file"] * 2, "chat_template.jinja")
    (made / "additional_chat_templates").mkdir()
    (made / "additional_chat_templates" / "tool_use.jinja").write_text("for {{ tools | length }} tools")
    same(prompts(), ["a file", "for 1 tools"], "additional_chat_templates")
    (folder / "given.jinja").write_text("given: {{ messages[0].content }}")
    same(prompts("--chat-template", folder / "given.jinja"), ["given: Hi"] * 2, "--chat-template")
    refused("render", made, "--chat-template", folder / "none.jinja", stdin="{}", code=2, words=["none.jinja"])
    (folder / "given.jinja").write_text("\n\n{{ x")
    refused("render", made, "--chat-template", folder / "given.jinja", stdin="{}", code=3, words=["line 3"])


def test_a_given_template_and_harmony(folder):
    """A given template counts for a model with harmony's tokens, too, in all commands. Answers are harmony if it writes that."""
    tiny = TESTS.parent / "models" / "tiny"
    ask = {"messages": [{"role": "user", "content": "2 + 3 ="}], "date": DATE, "temperature": 0}
    hello = folder / "hello.jinja"
    hello.write_text("Hello {{ messages[-1].content }}<|end|>")
    same(infer("render", tiny, "--chat-template", hello, stdin=json.dumps(ask)).text, "Hello 2 + 3 =<|end|>", "render")
    harmony = folder / "harmony.jinja"
    harmony.write_text(infer("render", tiny, stdin=json.dumps(ask)).text.replace("2 + 3 =", "{{ messages[-1].content }}"))
    options = ["--chat-template", harmony]
    same(ids_of(infer("render", tiny, "--ids", *options, stdin=json.dumps(ask))), render(ask, tiny), "render --ids")
    play = ["play", tiny, "-p", "2 + 3 =", "--temperature", "0", "--date", DATE]
    answer = infer(*play, program=PLAIN).out
    same(infer(*play, *options, program=PLAIN).out, answer, "play")
    expect(infer(*play, "--chat-template", hello, code=None, program=PLAIN).out != answer, "play takes no template")
    if has("serve"):
        from test_serve import Server

        def served(*options):
            with Server(tiny, *options, program=PLAIN) as s:
                return s.post("/v1/chat/completions", ask)
        given, own = served(*options), served()
        same(given["choices"], own["choices"], "serve")
    (folder / "broken.jinja").write_text("{{ x")
    for command in (["render", tiny], play):
        refused(*command, "--chat-template", folder / "broken.jinja", stdin="{}", code=3, words=["chat template, line 1"])


def test_what_templates_read(folder):
    """The effort and a client's chat_template_kwargs set variables; the last message can be continued."""
    def check(name, value):
        template, request, expected = value
        made = folder_of("SmolLM2", folder, template)
        conversation = {"messages": [{"role": "user", "content": "Hi"}], **request}
        same(infer("render", made, stdin=json.dumps(conversation)).text, expected, "prompt")
    shown = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ add_generation_prompt }}"
    last = "{% for m in messages %}<{{ m.content %s}}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One, "}]
    each([("as it is", (shown, {}, "True True  True")),
          ("none", (shown, {"reasoning_effort": "none"}, "False False  True")),
          ("high", (shown, {"reasoning_effort": "high"}, "True True high True")),
          ("no prompt", (shown, {"add_generation_prompt": False}, "True True  False")),
          ("others", ("{{ x.y }}{{ thinking }}", {"chat_template_kwargs": {"x": {"y": 1}, "thinking": "much"}}, "1much")),
          ("null", (shown, {"chat_template_kwargs": {"thinking": None}}, "True True  True")),
          ("documents", ("{{ documents[0].text }}{{ tools }}", {"documents": [{"text": "D"}]}, "DNone")),
          ("continued", (last.replace("%s", ""), {"messages": said, "continue_final_message": True}, "<Hi><One, ")),
          ("continued, trimmed", (last.replace("%s", "| trim "), {"messages": said, "continue_final_message": True}, "<Hi><One,")),
          ("date", ("{{ strftime_now('%d %B %Y, %A') }}", {"date": "2025-06-28"}, "28 June 2025, Saturday"))], check)
    made = folder_of("SmolLM2", folder, "x")
    refused("render", made, stdin=json.dumps({"messages": said, "continue_final_message": True}), code=2, words=["leaves out"])


def test_arguments_and_ids(folder):
    """Arguments are a mapping, or a text where the template raises then; ids are the client's, or have nine letters."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": [1.0]}"}}
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
                                    {"role": "tool", "tool_call_id": "call_1", "content": "7"}]})
    first, result = "messages[1].tool_calls[0]", "messages[2]"

    def check(template, expected):
        made = folder_of("SmolLM2", folder, template)
        same(infer("render", made, stdin=chat).text, expected, "prompt")
    each([(f"{{{{ {first}.function.arguments }}}}", "{'a': [1.0]}"),
          (f"{{{{ '>' + {first}.function.arguments }}}}", '>{"a": [1.0]}'),
          (f"{{{{ {first}.id }}}} {{{{ {result}.tool_call_id }}}} {{{{ {result}.name }}}}", "call_1 call_1 "),
          (f"{{% if {first}.id | length != 9 %}}{{{{ raise_exception('nine') }}}}{{% endif %}}{{{{ {first}.id }}}}", "0000call1"),
          (f"{{{{ 'of ' + {result}.name }}}}", "of f"),
          ("{{ messages[1].content is string }}{{ messages[1].tool_calls | length }}", "False1")], check)


def test_templates_that_are_no_utf8(folder):
    made = folder_of("SmolLM2", folder)
    (made / "chat_template.jinja").write_bytes(b"a\xff403;")
    refused("render", made, stdin="{}", code=3, words=["UTF-8"])


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
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    unnamed = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "a", "content": ""}]
    named = [{**m, "name": "functions.f"} if m["role"] == "tool" else m for m in unnamed]
    users = [{**m, "recipient": "functions.f"} if m["role"] == "user" else m for m in unnamed]
    for model in ("Qwen3", "Llama 3.1"):
        made = folder_of(model, folder)
        expected = render({"messages": unnamed}, made)
        same(render({"messages": named}, made), expected, "results with names")
        same(render({"messages": users}, made), expected, "users with recipients")


def test_arguments_may_be_empty(folder):
    """As some clients send those of a function that has none."""
    def prompt(model, arguments):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return render({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]},
                      folder_of(model, folder))
    for model in ("Qwen3", "Llama 3.1", "Mistral Nemo"):
        same(prompt(model, ""), prompt(model, "{}"), model)


def test_what_a_template_has_no_words_for(folder):
    question = {"messages": [{"role": "user", "content": "Hi"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    refused("render", folder_of("SmolLM2", folder), stdin=json.dumps({**question, "response_format": schema}), code=2,
            words=["response_format"])
    refused("render", PARROT, stdin=json.dumps({**question, "continue_final_message": True}), code=2, words=["continue_final"])
    refused("render", PARROT, stdin=json.dumps({**question, "reasoning_effort": "none"}), code=2, words=["effort"])


def test_models_without_a_template(folder):
    """Which reason is given."""
    made = folder_of("SmolLM2", folder)
    write_json(made / "tokenizer_config.json", {})
    refused("render", made, stdin="{}", code=3, words=["no chat template"])
    (made / "tokenizer_config.json").write_text("{")
    refused("render", made, stdin="{}", code=3, words=["tokenizer_config.json"])
    case = MODELS["SmolLM2"]["cases"][0]
    write_json(made / "tokenizer_config.json", {})
    write_json(made / "chat_template.json", {"chat_template": template_of("SmolLM2")})
    same(infer("render", made, stdin=json.dumps(case["conversation"])).text, case["text"], "prompt by chat_template.json")
