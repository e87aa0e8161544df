"""Makes tests/goldens/chat.json: prompts as the chat templates published with the models render them.

    TEST_DATA=DIR python tests/make_chat.py          (or DIR as the argument)
    needs: pip install jinja2 tokenizers

TEST_DATA/chat_templates holds published templates; the short ones of other models are written out here, and some differ
from a stored one in a few words: published V3.1 writes </think> where its stored copy has <think></think>. jinja2 is set up
as transformers does. Tests read stored templates from TEST_DATA, and change them in the same words.
Ids are by the published tokenizer.json, with control tokens recognised and without the file's template.
"""
import datetime
import json
import os
import sys
import tarfile
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"
DATE = "2025-06-28"
ALTERNATE = "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('') }}{% endif %}"
SPLIT = ("{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
         "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}")
PROMPT = "{% if add_generation_prompt %}{{ 'X' }}{% endif %}"

SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
           "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
           "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
           + PROMPT.replace("X", "<|im_start|>assistant\n"))
QWEN3_CODER = (SPLIT + "{%- if system_message is defined %}{{- \"<|im_start|>system\\n\" + system_message }}{%- elif tools %}"
               "{{- \"<|im_start|>system\\nYou are Qwen.\" }}{%- endif %}{%- if tools %}{{- '<tools>\\n<function=a>' }}{%- endif %}"
               "{%- if system_message is defined or tools %}{{- '<|im_end|>\\n' }}{%- endif %}"
               "{%- for message in loop_messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' "
               "+ '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")
ZEPHYR = ("{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
          "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
          "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
          "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
          "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}")
LLAMA3 = ("{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
          "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
          "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
          + PROMPT.replace("X", "<|start_header_id|>assistant<|end_header_id|>\n\n"))
LLAMA2 = (SPLIT.replace("{% endif %}", "{% set system_message = false %}{% endif %}")
          + "{% for message in loop_messages %}" + ALTERNATE +
          "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
          "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
          "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
          "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}")


def mistral(before, behind, where, answer):
    return (SPLIT + "{{- bos_token }}{%- for message in loop_messages %}" + ALTERNATE
            + '{%- if message["role"] == "user" %}{%- if ' + where + ' and system_message is defined %}{{- "' + before
            + '" + system_message + "\\n\\n" + message["content"] + "' + behind + '" }}{%- else %}{{- "' + before
            + '" + message["content"] + "' + behind + '" }}{%- endif %}{%- else %}{{- ' + answer
            + "}}{%- endif %}{%- endfor %}")


def mistral_tools(space, answer):
    """Calls and results count as no turn. Texts of a function are not escaped, so plain() leaves out their quotes."""
    return (SPLIT + "{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}"
            "{%- set ns = namespace(turn=0) %}{{- bos_token }}{%- for message in loop_messages %}"
            "{%- if not (message.role == 'tool' or message.tool_calls) %}"
            "{%- if (message['role'] == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('') }}{%- endif %}"
            "{%- set ns.turn = ns.turn + 1 %}{%- endif %}{%- if message['role'] == 'user' %}"
            "{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS]S[' }}{%- for tool in tools %}"
            "{{- '{\"type\": \"function\", \"function\": {' }}{%- for key, value in tool.function.items() %}"
            "{{- '\"' + key + '\": ' + ('\"' + value + '\"' if value is string else value | tojson) }}"
            "{{- ', ' if not loop.last }}{%- endfor %}{{- '}}' + (']' if loop.last else ', ') }}{%- endfor %}"
            "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if loop.last and system_message is defined %}"
            "{{- '[INST]S' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
            "{{- '[INST]S' + message['content'] + '[/INST]' }}{%- endif %}{%- elif message.tool_calls %}"
            "{{- '[TOOL_CALLS]S[' }}{%- for call in message.tool_calls %}"
            "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' + (']' + eos_token if loop.last else ', ') }}"
            "{%- endfor %}{%- elif message['role'] == 'assistant' %}{{- " + answer + " }}{%- elif message['role'] == 'tool' %}"
            "{{- '[TOOL_RESULTS]S{\"content\": ' + message.content + ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
            "{%- else %}{{- raise_exception('') }}{%- endif %}{%- endfor %}").replace("]S", "]" + space)


MISTRAL_OLD = ("{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
               "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
               "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('') }}{% endif %}{% endfor %}")
MISTRAL_SMALL = ("{%- set today = strftime_now(\"%Y-%m-%d\") %}\n{%- set default_system_message = \"You are Mistral Small 3.\\n"
                 "The current date is \" + today + \".\\n\\nYou're asked (e.g. \\\"What is near?\\\" => \\\"Near what?\\\")\" %}\n\n"
                 "{{- bos_token }}\n\n" + SPLIT.replace("{% endif %}", "{% set system_message = default_system_message %}{% endif %}").replace("{% ", "{%- ") +
                 "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}{%- for message in loop_messages %}"
                 "{%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}"
                 "{%- elif message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}"
                 "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}{%- endif %}{%- endfor %}")
GEMMA3 = ("{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- set first_user_prefix = "
          "messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}\n{%- else -%}\n"
          "    {%- set first_user_prefix = \"\" -%}{%- set loop_messages = messages -%}\n{%- endif -%}\n"
          "{%- for message in loop_messages -%}" + ALTERNATE +
          "{%- if (message['role'] == 'assistant') -%}{%- set role = \"model\" -%}{%- else -%}"
          "{%- set role = message['role'] -%}{%- endif -%}\n"
          "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else \"\") }}"
          "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}\n{%- endfor -%}\n"
          "{%- if add_generation_prompt -%}\n    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n")
DEEPSEEK2 = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
             "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
             "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
             "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}" + PROMPT.replace("X", "Assistant:"))


def deepseek(user, answer):
    """Templates of 2025; those parts that write calls and results are left out."""
    return ("{% set ns = namespace(system_prompt='', is_first_sp=true, is_last_user=false) %}" + FIND_SYSTEM + "{{ bos_token }}"
            "{{ ns.system_prompt }}{%- for message in messages %}{% set content = message['content'] %}"
            "{%- if message['role'] == 'user' %}{%- set ns.is_last_user = true -%}{{'<｜User｜>' + " + user + " + '<｜Assistant｜>'}}"
            "{%- endif %}{%- if message['role'] == 'assistant' %}" + answer + "{%- set ns.is_last_user = false -%}"
            "{{content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
            "{% if add_generation_prompt and not ns.is_last_user %}{{'<｜Assistant｜>'}}{% endif %}")


LATEST = "{%- set ns.system_prompt = message['content'] -%}"
JOINED = ("{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}"
          "{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}"
          "{%- endif %}")
FIND_SYSTEM = ("{%- for message in messages %}{%- if message['role'] == 'system' %}" + JOINED + "{%- endif %}{%- endfor %}")
CUT = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
R1 = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = CHATML + ["<tool_call>", "</tool_call>"]
QWEN3 = QWEN + ["<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]"]
MISTRAL_TOOLS = MISTRAL + ["[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
# the format's name in formats/templates.c: template (a file, or its text), what it has, control tokens (BOS and EOS below), tokenizer
BOS, EOS = ("<|begin_of_text|>", "<s>", "<bos>", DEEPSEEK[0]), ("</s>", DEEPSEEK[1], "<|eot_id|>")
MODELS = {  # the template, or the stored one's name, or that and what changes in it; its control tokens; whose tokenizer
    "SmolLM2": (SMOLLM2, CHATML, "smollm2"),
    "Qwen2.5": ("Qwen-Qwen2.5-7B-Instruct", QWEN, "qwen2.5"),
    "Qwen2.5-Math": (
        ("Qwen-Qwen2.5-7B-Instruct", ( ("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "Please reason step by step, and put your final answer within \\\\boxed{}."),)),
        QWEN, "qwen2.5"),
    "Qwen3-Coder": (QWEN3_CODER, QWEN, "qwen3"),
    "Qwen3": ("Qwen-Qwen3-0.6B", QWEN3, "qwen3"),
    "Qwen3-2507, thinking": (
        ("Qwen-Qwen3-0.6B", ( ("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}"), ("enable_thinking is false", "false"))),
        QWEN3, "qwen3"),
    "Qwen3-2507, copies": (
        ("Qwen-Qwen3-0.6B", ( ("enable_thinking is defined and enable_thinking is false", "false"),)),
        QWEN3, "qwen3"),
    "Llama 3": (LLAMA3, LLAMA, "llama3.1"),
    "Llama 3.1": ("meta-llama-Llama-3.1-8B-Instruct", LLAMA, "llama3.1"),
    "Llama 3.1, copies": (("meta-llama-Llama-3.1-8B-Instruct", (("26 Jul 2024", "26 July 2024"),)), LLAMA, "llama3.1"),
    "Llama 3.2": ("meta-llama-Llama-3.2-3B-Instruct", LLAMA, "llama3.1"),
    "Llama 2": (LLAMA2, ["<s>", "</s>"], "llama2"),
    "TinyLlama": (ZEPHYR, ["<s>", "</s>"], "llama2"),
    "Mistral v0.1": (
        mistral(" [INST] ", " [/INST]", "loop.first", '" " + message["content"] + eos_token'),
        ["<s>", "</s>"], "llama2"),
    "Mistral v0.2, old": (MISTRAL_OLD, ["<s>", "</s>"], "llama2"),
    "Mistral v0.3": (mistral_tools(" ", '" " + message["content"]|trim + eos_token'), MISTRAL_TOOLS, "mistral-7b-v0.3"),
    "Mistral Nemo": (mistral_tools("", 'message["content"] + eos_token'), MISTRAL_TOOLS, None),
    "Mistral Small 3": (MISTRAL_SMALL, MISTRAL + ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"], None),
    "Gemma 2": ("google-gemma-2-2b-it", GEMMA, "gemma2"),
    "Gemma 3": (GEMMA3, GEMMA, "gemma3"),
    "DeepSeek V2": (DEEPSEEK2, DEEPSEEK[:2], None),
    "DeepSeek V3": (
        (R1, (("<think>\\n", ""), ("content.split('</think>')[-1]", "content"), ("'</think>'", "'x'"))),
        DEEPSEEK, "deepseek-r1"),
    "DeepSeek V3-0324": (deepseek("message['content']", ""), DEEPSEEK, "deepseek-r1"),
    "DeepSeek V3.1": (("deepseek-ai-DeepSeek-V3.1", (("<think></think>", "</think>"),)), DEEPSEEK, "deepseek-r1"),
    "DeepSeek R1, early": ((R1, (("<think>\\n", ""),)), DEEPSEEK, "deepseek-r1"),
    "DeepSeek R1": (R1, DEEPSEEK, "deepseek-r1"),
    "DeepSeek R1, February": (
        (R1, ((LATEST, JOINED), ("system_prompt='')", "system_prompt='', is_first_sp=true)"))),
        DEEPSEEK, "deepseek-r1"),
    "DeepSeek R1-0528": (deepseek("content", CUT), DEEPSEEK, "deepseek-r1"),
}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(text, *calls, **more):
    return assistant(text, tool_calls=[{"id": f"call_{i}", "type": "function", "function": {
        "name": name, "arguments": json.dumps(arguments)}} for i, (name, arguments) in enumerate(calls)], **more)


def result(text, i=0):
    return {"role": "tool", "tool_call_id": f"call_{i}", "content": text}


RESULT = "<tool_response>\n7\n</tool_response>"
HI, HELLO, SUM = user("Hi"), assistant("Hello."), user("2+2?")
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather: \"now\", é and 漢字.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Where?", "enum": ["Bern", "Köln"]},
                                         "days": {"type": "integer", "minimum": -1.5}, "any": {}}, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
BERN = ("get_weather", {"city": "Köln", "days": 2, "more": {"a": [1, 2.5, True, None, "x:y, z"], "b": [], "c": {}}})
NUMBERS = [1.0, -0.5, 1e-07, 1e+22, 9007199254740991, -9223372036854775808, 12345678901234567890, 0.3333333333333333, 0]
COUNT = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {"n": {
    "type": "integer", "description": "\"1.0\", \\", "maximum": 9007199254740991, "default": 1.0, "enum": NUMBERS}}}}}
ODD = "\u3000 Zürich 漢字 😀👩‍🚀 e\u0301 עברית \u00a0 x\r\ny \u2003\n"
CASES = {
    "one question": [HI],
    "system": [system("Be brief."), HI],
    "several turns": [system("Be brief."), HI, HELLO, SUM],
    "turns without system": [HI, HELLO, SUM, assistant("4"), user("Sure?")],
    "empty system": [system(""), HI],
    "empty texts": [user(""), assistant(""), user("")],
    "white space": [system(" \n Be brief.\n "), user("\n  Hi \t"), assistant("  Hello.\n\n"), user(" 2 + 2\n")],
    "unicode": [system(ODD), user(ODD), assistant(ODD), user(ODD)],
    "control tokens": [system("%"), user("a%b"), assistant("%"), user("%\n%")],
    "jinja": [system("{{ x }}"), user("{% if %}%s %t %d %e"), assistant("{# #}"), user("{{ bos_token }}")],
    "two systems": [system("A."), system("B."), HI],
    "system later": [system("A."), HI, HELLO, system("B."), SUM],
    "no prompt": [HI, HELLO],
}
THINKING = {
    "thoughts": [HI, assistant("Hello.", reasoning_content="Greet back."), SUM],
    "a thought without an answer": [HI, assistant("", reasoning_content="Greet back."), SUM],
    "thoughts in the answer": [HI, assistant("<think>\nGreet back.\n</think>\n\nHello."), SUM],
    "effort none": [HI, HELLO, SUM],
    "no prompt, thoughts": [HI, assistant("Hello.", reasoning_content="Greet back.")],
}
CALLING = {
    "tools": [HI],
    "tools, system": [system("Be brief."), HI],
    "tools, empty system": [system(""), HI],
    "call": [HI, call("", BERN), result("7 °C, \"dry\"")],
    "call with text": [system("A."), HI, call("I look.", BERN), result("7")],
    "numbers": [HI, call("", ("count", {"n": NUMBERS, "-1": {"1e5": 1234567890123456789}})), result("1.0")],
    "call answered": [system("Be brief."), HI, call("", BERN), result("{\"t\": 7}"), assistant("7 degrees."), SUM],
}
SEVERAL = {
    "two calls": [HI, call("I look.", BERN, ("clock", {})), result("7"), result("12:00", 1), assistant("Both."), SUM,
                  call("", ("clock", {})), result("12:01")],
}
THOUGHT_CALLS = {
    "thoughts before calls": [HI, call("", BERN, reasoning_content="I look."), result("7"),
                              call("Now the time.", ("clock", {}), reasoning_content="Time too."), result("12:00")],
    "empty thoughts before a result": [HI, call("<think>\n\n</think>\n\n", BERN), result("7"),
                                       call("", ("clock", {}), reasoning_content="\n\n"), result("12:00")],
    "thoughts without a question": [HELLO, assistant("4", reasoning_content="Sum.")],
    "results by the user, control tokens": [HI, assistant("<tool_call>", reasoning_content="I look."), user(RESULT)],
    "thoughts before the last question": [HI, call("", BERN, reasoning_content="I look."), result("7"),
                                          assistant("7.", reasoning_content="So 7."), SUM],
}


def environment():
    def raise_exception(message):
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None: json.dumps(x, ensure_ascii=ensure_ascii,
                                                                                  indent=indent)
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = datetime.date.fromisoformat(DATE).strftime
    return env


def plain(tool):
    return {**tool, "function": {**tool["function"], "description": tool["function"]["description"].replace('"', "")}}


def for_template(message):
    """Arguments are an object, as transformers wants them, and ids have nine letters or digits, as Mistral wants them."""
    message = json.loads(json.dumps(message))
    for each in message.get("tool_calls", []):
        each["function"]["arguments"] = json.loads(each["function"]["arguments"])
        each["id"] = each["id"].replace("_", "").zfill(9)
    if "tool_call_id" in message:
        message["tool_call_id"] = message["tool_call_id"].replace("_", "").zfill(9)
    return message


def special(controls):
    return {"bos_token": next((c for c in controls if c in BOS), ""), "eos_token": next((c for c in controls if c in EOS), "")}


def render(model, template, controls, name, messages, tools):
    """A case: the conversation and the prompt; None where the template refuses it."""
    names = "".join(controls)
    messages = [{**m, "content": m["content"].replace("%", names)} if name == "control tokens" else m for m in messages]
    effort = "none" if name == "effort none" else "medium"
    values = {**special(controls), "enable_thinking": effort != "none", "thinking": effort != "none",
              "add_generation_prompt": not name.startswith("no prompt")}
    if tools:
        values["tools"] = tools
    try:
        text = environment().from_string(template).render(messages=[for_template(m) for m in messages], **values)
    except TemplateError:
        text = None
    conversation = {"messages": messages, "reasoning_effort": effort, "date": DATE,
                    "add_generation_prompt": values["add_generation_prompt"], **({"tools": tools} if tools else {})}
    return {"name": name, "conversation": conversation, "text": text}


def others(folder):
    """Templates as people save them into fine-tunes, and what only looks like a known one."""
    controls = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
    found = {f"others/{f.stem}": (f"others/{f.stem}", controls, None) for f in sorted(folder.glob("others/*.jinja"))}
    gemma = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<start_of_turn>user\nTranslate:\n\n\n' + m['content'] "
             "| trim + '<end_of_turn>\n' }}{% else %}{{ '<start_of_turn>model\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
             "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
    spaced = (SPLIT + "{{ bos_token }}{% for m in loop_messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' "
              "+ (system_message + ' ' if loop.first and system_message is defined else '') + m['content'] | trim + '<end_of_turn>\n' }}"
              "{% endfor %}" + PROMPT.replace("X", "<start_of_turn>model\n"))
    short = ("{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
             "{% if m['role'] == 'system' and tools %}{{ 'Cutting Knowledge Date: December 2023\n' }}{% endif %}{{ m['content'] + '<|eot_id|>' }}"
             "{% endfor %}" + PROMPT.replace("X", "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\n"))
    role = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}{{ '<|assistant|>\n' }}"
    return found | {"SmolLM3": ("HuggingFaceTB-SmolLM3-3B", QWEN3, "smollm2"), "a Gemma that translates": (gemma, GEMMA, "gemma2"),
                    "a Gemma with a space behind the system text": (spaced, GEMMA, "gemma2"),
                    "a Llama without dates, which thinks": (short, LLAMA, "llama3.1"),
                    "roles in tokens": (role, ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], None)}


def cases_of(model, template, controls, tokenizer):
    thinks, several = "<think>" in controls and "</think>" in template, {"<tool_call>", "[TOOL_CALLS]"} & {*controls}
    calls = (several and model != "Qwen3-Coder") or model[:9] in ("Llama 3.1", "Llama 3.2")
    tools = [plain(WEATHER) if "[TOOL_CALLS]" in controls else WEATHER, CLOCK]
    few = ("system", "several turns", "white space", "control tokens", "no prompt") if "others/" in model else CASES
    found = [render(model, template, controls, name, CASES[name], None) for name in few]
    if thinks:
        chosen = {k: m for k, m in THINKING.items() if k != "effort none" or model in ("Qwen3", "DeepSeek V3.1")}
        found += [render(model, template, controls, name, m, None) for name, m in chosen.items()]
    if calls:
        chosen = {**CALLING, **(SEVERAL if several else {}), **(THOUGHT_CALLS if thinks else {})}
        found += [render(model, template, controls, name, m, [*tools, *[COUNT] * (name == "numbers")])
                  for name, m in chosen.items()]
    for case in found:
        if case["text"] and tokenizer and "control tokens" not in case["name"]:
            case["ids"] = tokenizer.encode(case["text"], add_special_tokens=False).ids
    return found


def main():
    data = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["TEST_DATA"])
    archive = tarfile.open(data / "families.tar.xz")
    tokenizers = {m.name.split("/")[1]: Tokenizer.from_buffer(archive.extractfile(m).read())
                  for m in archive if m.name.startswith("tokenizers/") and m.isfile()}
    out = []
    for model, (source, controls, tokenizer) in {**MODELS, **others(data / "chat_templates")}.items():
        file = None if isinstance(source, str) and "{" in source else data / "chat_templates"
        name, changes = (source, ()) if isinstance(source, str) else source
        template = (file / f"{name}.jinja").read_text() if file else source
        for before, behind in changes:
            assert before in template
            template = template.replace(before, behind)
        cases = cases_of(model, template, controls, tokenizers.get(tokenizer))
        out.append({"model": model, "file": f"{name}.jinja" if file else None, "changes": changes, "template": None if file else template, "special": special(controls),
                    "controls": controls, "tokenizer": tokenizer, "cases": cases})
        print(f"{model}: {sum(case['text'] is not None for case in cases)} prompts")
    (GOLDENS / "chat.json").write_text(
        "[" + ",\n".join(json.dumps(m, ensure_ascii=False, separators=(",", ":")) for m in out) + "]\n")


if __name__ == "__main__":
    main()
