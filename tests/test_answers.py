"""How a model's answers are read is chosen by what its chat template writes: small templates that write calls and thoughts
as published ones do, each with an answer as the model gives it. unit.c reads more of them."""
import json

from test_chat import template_of
from test_prompt import message, parse

from helpers import PARROT, copy_model, each, ids_of, infer, read_json, same, write_json

NEEDS = ("formats", "commands")  # rooms

JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
PARAMETERS = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
LIST = '[{% for c in m.tool_calls %}{% set f = c.function %}{{ ", " if loop.index0 }}' + JSON + "{% endfor %}]"
PAIRS = "{% for k, v in f.arguments.items() %}"
PYTHON = ('[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}'
          "{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]")


def of_each(call):
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + call + "{% endfor %}"


CALLS = {  # how a template writes the calls of message m; an answer; the added tokens
    "Hermes": (of_each("<tool_call>\n" + JSON + "\n</tool_call>"),
               '<tool_call>\n{"name": "f", "arguments": {"place": "Bern"}}\n</tool_call>', ["<tool_call>", "</tool_call>"]),
    "Qwen3-Coder": (of_each("<tool_call>\n<function={{ f.name }}>\n" + PAIRS + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
                            "{% endfor %}</function>\n</tool_call>"),
                    "<tool_call>\n<function=f>\n<parameter=place>\nBern\n</parameter>\n</function>\n</tool_call>",
                    ["<tool_call>", "</tool_call>"]),
    "GLM": (of_each("\n<tool_call>{{ f.name }}\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
                    "{% endfor %}</tool_call>"),
            "<tool_call>f\n<arg_key>place</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
            ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]),
    "Seed": (of_each("<seed:tool_call>\n<function={{ f.name }}>\n" + PAIRS + "<parameter={{ k }}>{{ v }}</parameter>\n"
                     "{% endfor %}</function>\n</seed:tool_call>"),
             "<seed:tool_call>\n<function=f>\n<parameter=place>Bern</parameter>\n</function>\n</seed:tool_call>",
             ["<seed:tool_call>", "</seed:tool_call>"]),
    "MiniMax": ("<minimax:tool_call>\n" + of_each('<invoke name="{{ f.name }}">\n' + PAIRS + '<parameter name="{{ k }}">'
                                                  "{{ v }}</parameter>\n{% endfor %}</invoke>\n") + "</minimax:tool_call>",
                '<minimax:tool_call>\n<invoke name="f">\n<parameter name="place">Bern</parameter>\n</invoke>\n'
                "</minimax:tool_call>", ["<minimax:tool_call>", "</minimax:tool_call>"]),
    "DeepSeek V3.2": ("<｜DSML｜function_calls>\n" + of_each(
        '<｜DSML｜invoke name="{{ f.name }}">\n' + PAIRS + '<｜DSML｜parameter name="{{ k }}" string="true">{{ v }}'
        "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n") + "</｜DSML｜function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="place" string="true">Bern'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", []),
    "DeepSeek V3.1": ("<｜tool▁calls▁begin｜>" + of_each("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
                                                      "<｜tool▁call▁end｜>") + "<｜tool▁calls▁end｜>",
                      '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"place":"Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
                      ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]),
    "DeepSeek": ("<｜tool▁calls▁begin｜>" + of_each(  # arguments must be a text there
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments + '\n```<｜tool▁call▁end｜>' }}")
        + "<｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"place":"Bern"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]),
    "Kimi": ("<|tool_calls_section_begin|>" + of_each(  # its ids hold the names, so that tokens have to tell
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>")
        + "<|tool_calls_section_end|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"place": "Bern"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<|tool_calls_section_end|>"]),
    "Gemma 4": (of_each("<|tool_call>call:{{ f.name }}{{ '{' }}" + PAIRS + '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}{{ "}" }}<tool_call|>'),
                '<|tool_call>call:f{place:<|"|>Bern<|"|>}<tool_call|>', ["<|tool_call>", "<tool_call|>", '<|"|>']),
    "FunctionGemma": (of_each("<start_function_call>call:{{ f.name }}{{ '{' }}" + PAIRS + "{{ k }}:<escape>{{ v }}<escape>{% endfor %}{{ '}' }}"
                              "<end_function_call>"),
                      "<start_function_call>call:f{place:<escape>Bern<escape>}<end_function_call>",
                      ["<start_function_call>", "<end_function_call>", "<escape>"]),
    "LFM2": ("<|tool_call_start|>" + PYTHON + "<|tool_call_end|>", '<|tool_call_start|>[f(place="Bern")]<|tool_call_end|>',
             ["<|tool_call_start|>", "<|tool_call_end|>"]),
    "Olmo 3": ("<function_calls>\n" + PYTHON[1:-1] + "\n</function_calls>", '<function_calls>\nf(place="Bern")\n</function_calls>', []),
    "Phi-4-mini": ("<|tool_call|>" + LIST + "<|/tool_call|>",
                   '<|tool_call|>[{"name": "f", "arguments": {"place": "Bern"}}]<|/tool_call|>', ["<|tool_call|>", "<|/tool_call|>"]),
    "Granite": ("<|tool_call|>" + LIST, '<|tool_call|>[{"arguments": {"place": "Bern"}, "name": "f"}]', ["<|tool_call|>"]),
    "Mistral": ("[TOOL_CALLS]" + LIST, '[TOOL_CALLS][{"name": "f", "arguments": {"place": "Bern"}}]', ["[TOOL_CALLS]"]),
    "Mistral, named": (of_each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
                       '[TOOL_CALLS]f[ARGS]{"place": "Bern"}', ["[TOOL_CALLS]", "[ARGS]"]),
    "Llama 3": (of_each(PARAMETERS), '{"name": "f", "parameters": {"place": "Bern"}}', ["<|python_tag|>"]),
    "pythonic": (PYTHON, '[f(place="Bern")]', []),
}
TURNS = ("{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
         "{% if m.tool_calls %}CALLS{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nBEGUN{% endif %}")


def model(folder, template, tokens):
    """A model with the parrot's vocabulary, a chat template and these added tokens."""
    made = copy_model(PARROT, folder)
    tokenizer = read_json(made / "tokenizer.json")
    for token, name in zip(tokenizer["added_tokens"], ["<|im_start|>", "<|im_end|>", *tokens]):
        token.update(content=name, special=name.startswith("<|im_"))
    write_json(made / "tokenizer.json", tokenizer)
    write_json(made / "tokenizer_config.json", {"chat_template": template})
    return made


def facts(made):
    """What inspect says about how answers are read."""
    found = json.loads(infer("inspect", made, "--json").out)
    return found.get("thoughts"), found.get("calls")


def test_calls_as_the_template_writes_them(folder):
    """Each row is chosen by the rendering, and reads the model's answer; with marks as tokens, and spelled out."""
    call = message('{"place": "Bern"}', "commentary", recipient="functions.f", content_type="<|constrain|>json")

    def check(name, row, written, answer, tokens):
        made = model(folder, TURNS.replace("CALLS", written).replace("BEGUN", ""), tokens)
        same(facts(made)[1], row, "calls")
        ids = ids_of(infer("tokenize", made, "--special", stdin=answer + "<|im_end|>"))
        same(parse(ids, made)[0], [call], "messages")
    each([(row, row, *case) for row, case in CALLS.items()]
         + [(f"{row}, without tokens", row, written, answer, []) for row, (written, answer, _) in CALLS.items() if row != "Kimi"],
         check)


def test_calls_of_published_templates(folder):
    """R1's leaves out what closes the calls behind a single one."""
    def check(name, row, tokens):
        same(facts(model(folder, template_of(name), tokens))[1], row, "calls")
    marks = CALLS["DeepSeek"][2]
    each([(name, row, tokens) for tokens in (marks, []) for name, row in (
        ("DeepSeek V3.1", "DeepSeek V3.1"), ("DeepSeek R1", "DeepSeek"), ("Qwen3", "Hermes"))], check)


def test_thoughts_as_the_template_writes_them(folder):
    """By those of the history, by the end of a prompt, by tokens that the template names. Without any they are text."""
    def check(name, written, begun, tokens, open_, close):
        said = "{% if m.reasoning_content %}" + written + "{% endif %}{{ m.content or '' }}"
        made = model(folder, TURNS.replace("{{ m.content or '' }}", said).replace("CALLS", "").replace("BEGUN", begun), tokens)
        same(facts(made)[0], open_, "thoughts")
        answer = ("" if begun else open_) + f"\nA\n{close}\n\nHi<|im_end|>" if close else "<think>A</think>Hi<|im_end|>"
        expected = [message("A", "analysis"), message("Hi", "final")] if close else [message("<think>A</think>Hi", "final")]
        same(parse(ids_of(infer("tokenize", made, "--special", stdin=answer)), made)[0], expected, "messages")
    history = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    each([("history", history, "", ["<think>", "</think>"], "<think>", "</think>"),
          ("history, spelled out", history, "", [], "<think>", "</think>"),
          ("Mistral's", "[THINK]{{ m.reasoning_content }}[/THINK]", "", ["[THINK]", "[/THINK]"], "[THINK]", "[/THINK]"),
          ("Seed's", "<seed:think>{{ m.reasoning_content }}</seed:think>", "", [], "<seed:think>", "</seed:think>"),
          ("Gemma's", "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>", "", ["<|channel>", "<channel|>"],
           "<|channel>thought", "<channel|>"),
          ("prompt", "", "<think>\n", ["<think>", "</think>"], "<think>", "</think>"),
          ("prompt, spelled out", "", "<think>\n", [], "<think>", "</think>"),
          ("tokens", "{# </think> #}", "", ["<think>", "</think>"], "<think>", "</think>"),
          ("none", "", "", ["<think>", "</think>"], "none: they are text", "")], check)
