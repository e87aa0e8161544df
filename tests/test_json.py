"""What json/ makes of schemas, beside the package jsonschema."""
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import helpers
import schemas
from helpers import PARROT, TESTS, Skip, copy_model, each, expect, needs, same
from test_serve import Server

NEEDS = ("json",)
SCHEMAS = 500


def python():
    """A Python that has jsonschema."""
    for path in (os.environ.get("SCHEMA_PYTHON"), sys.executable):
        if path and not subprocess.run([path, "-c", "import jsonschema"], capture_output=True).returncode:
            return path
    raise Skip("needs the package jsonschema")


def valid(pairs):
    """Which of the pairs (schema, JSON text) jsonschema finds valid."""
    code = ("import json, sys\nfrom jsonschema import Draft202012Validator as V\n"
            "print(json.dumps([V(s).is_valid(json.loads(t)) for s, t in json.load(sys.stdin)]))")
    out = subprocess.run([python(), "-c", code], input=json.dumps(pairs), capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


def grammars(requests, tokenizer=()):
    """What tests/schemas.c says of each, by bytes or by the tokens of a tokenizer.json."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    p = subprocess.run([helpers.BUILD / "reference" / "schemas", *tokenizer], input=lines, capture_output=True, text=True)
    expect(not p.returncode, f"{p.returncode}: {p.stderr}")
    return [json.loads(line) for line in p.stdout.split("\n")[:-1]]


def check(made, samples, tokenizer=()):
    """Values that satisfy their schema can be written; random texts that can be written satisfy it."""
    told = grammars([{"schema": schema, "texts": texts, "samples": samples} for schema, texts in made], tokenizer)
    found = []
    for (schema, texts), answer in zip(made, told):
        expect("error" not in answer, f"{answer.get('error')}: {json.dumps(schema)}")
        for text, accepted in zip(texts, answer["accepts"]):
            expect(accepted, f"{text} cannot be written: {json.dumps(schema)}")
        found += [(schema, text) for text in answer["samples"]]
    for (schema, text), ok in zip(found, valid(found)):
        expect(ok, f"{text[:300]} was written: {json.dumps(schema)}")
    expect(len(found) == samples * len(made), f"only {len(found)} texts ended")


def random_schemas(n, texts):
    """Schemas, each with texts of values that jsonschema finds valid."""
    r = random.Random(int.from_bytes(os.urandom(4), "big"))
    made = [schemas.make_root(r) for _ in range(n)]
    made = [(schema, [schemas.written(r, v) for v in (make(r) for _ in range(texts)) if v is not None]) for schema, make in made]
    right = iter(valid([(schema, text) for schema, given in made for text in given]))
    made = [(schema, [text for text in given if next(right)]) for schema, given in made]
    expect(sum(len(given) for _, given in made) > 0.75 * n * texts - 2, "too few values")
    return made


def test_random_schemas():
    check(random_schemas(SCHEMAS, 4), 4)


def test_random_schemas_by_tokens_of_families(folder):
    """Instances forced token by token, and texts of random tokens, with every tokenizer."""
    with tarfile.open(helpers.data("families.tar.xz")) as archive:
        archive.extractall(folder)
    paths = sorted(folder.glob("tokenizers/*/tokenizer.json"))
    expect(len(paths) >= 10, "too few tokenizers")
    for path in paths:
        check(random_schemas(SCHEMAS // len(paths), 1), 0, [path])
        check(random_schemas(5, 1), 1, [path])


def test_random_schemas_by_tokens_of_gpt_oss():
    check(random_schemas(SCHEMAS // 5, 2), 0, [helpers.data("gpt-oss-20b") / "tokenizer.json"])


# ---- answers of models

def complete(s, body, path="/v1/completions"):
    """The text and how it ended."""
    choice = s.post(path, body)["choices"][0]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


def satisfied(s, made, least):
    """Asks for an answer to each schema at temperature 1. What the model ends satisfies it; at least so many end."""
    def ask(i):
        return complete(s, {"prompt": "x", "guided_json": made[i][0], "seed": i, "temperature": 1, "max_tokens": 150})
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(made))))
    expect(all(finish in ("stop", "length") for _, finish in answers), answers)
    ended = [(schema, text) for (schema, _), (text, finish) in zip(made, answers) if finish == "stop"]
    expect(len(ended) >= least, f"only {len(ended)} ended")
    for (schema, text), ok in zip(ended, valid(ended)):
        expect(ok, f"{text} for {json.dumps(schema)}")


def test_answers_of_tiny_satisfy_random_schemas():
    needs("serve")
    with Server(TESTS.parent / "models" / "tiny", program=helpers.PLAIN) as s:
        satisfied(s, random_schemas(30, 1), 8)


def test_answers_of_random_weights_satisfy_random_schemas():
    needs("serve")
    with Server(PARROT, program=helpers.PLAIN) as s:
        satisfied(s, random_schemas(SCHEMAS, 1), SCHEMAS // 4)


def test_answers_satisfy_random_schemas():
    """Of a model of random weights."""
    needs("serve")
    with Server(PARROT) as s:
        satisfied(s, random_schemas(60, 1), 20)
        schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": ["long words are forced"]}},
                  "required": ["a", "b"]}
        body = {"prompt": "x", "guided_json": schema, "seed": 5, "max_tokens": 80}
        alone = complete(s, body)
        with ThreadPoolExecutor(8) as pool:  # beside others with and without a schema
            others = [pool.submit(complete, s, {"prompt": "y", "seed": i, "max_tokens": 60, "guided_json": {} if i % 2 else None})
                      for i in range(8)]
            for _ in range(3):
                same(complete(s, body), alone, "beside others")
            for other in others:
                other.result()
        expect(json.loads(alone[0])["b"] == "long words are forced" and alone[1] == "stop", alone)
        text, finish = complete(s, {**body, "stop": ["words"]})
        expect(finish == "length" and text.endswith("long "), (text, finish))
        for field, value, full in (("guided_choice", ["yes", "no"], "yes|no"), ("guided_regex", "[ab]{3}-x?", "[ab]{3}-x?"),
                                   ("structured_outputs", {"regex": "[0-9]{2}"}, "[0-9]{2}"),
                                   ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, "é"]}}}, '1|"é"')):
            text, finish = complete(s, {"prompt": "x", field: value, "max_tokens": 80})
            expect(finish == "stop" and re.fullmatch(full, text), f"{field}: {text!r}, {finish}")
        for path in ("/v1/completions", "/v1/chat/completions"):
            prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
            error = s.refuses(path, {**prompt, "guided_json": {"items": {"multipleOf": 2}}}, "multipleOf at #/items")
            same(error["param"], "guided_json")
            s.refuses(path, {**prompt, "structured_outputs": "x"}, "structured_outputs is not an object")
            s.refuses(path, {**prompt, "response_format": {"type": "json"}}, "response_format needs", "json_object")
            s.refuses(path, {**prompt, "response_format": "json_object"}, "response_format needs", "json_object")


def test_texts_that_no_token_writes(folder):
    """A tokenizer without a letter: an answer that needs it ends with an error, and no other letter takes its place."""
    needs("serve")
    made = copy_model(PARROT, folder)
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if "q" not in text}
    model["merges"] = [pair for pair in model["merges"] if "q" not in "".join(pair)]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Server(made, program=helpers.PLAIN) as s:
        s.refuses("/v1/completions", {"prompt": "x", "guided_choice": ["aq"], "max_tokens": 9}, "tokens cannot write")
        same(complete(s, {"prompt": "x", "guided_choice": ["q", "b"], "max_tokens": 9}), ("b", "stop"))


def test_hostile_patterns():
    """Patterns that can be read in very many ways: others do not wait for them, and what cannot be kept ends with an error."""
    needs("serve")
    hostile = ["(((.{0,50}b?){0,50}c?){0,50}d?){0,50}"] * 14 + ["([^x]*.{0,200}[^y]*.{0,300}){10}"] * 6
    with Server(PARROT, program=helpers.PLAIN) as s, ThreadPoolExecutor(len(hostile)) as pool:
        def ask(i):
            body = {"prompt": "x", "guided_regex": hostile[i], "seed": i, "max_tokens": 40}
            try:
                return complete(s, body)[1]
            except AssertionError as e:
                return str(e)
        answers = [pool.submit(ask, i) for i in range(len(hostile))]
        began = time.monotonic()
        for i in range(3):
            complete(s, {"prompt": "x", "guided_regex": "[a-z]{1,9}x?|.*", "seed": i, "max_tokens": 20})
        took = time.monotonic() - began
        expect(took < helpers.patience(4), f"others waited {took:.0f} s")
        for ended in (answer.result() for answer in answers):
            expect(ended in ("stop", "length") or ("status 400" in ended and "in too many ways" in ended), ended)


def test_calls_keep_their_schemas():
    """Harmony: strict tools, required and named calls of models/tiny, with reasoning in front where nothing is forced."""
    needs("serve")
    numbers = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
               "required": ["a", "b"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "add", "parameters": numbers, "strict": True}},
             {"type": "function", "function": {"name": "now"}}]
    ask = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "tools": tools, "max_tokens": 200}
    with Server(TESTS.parent / "models" / "tiny") as s:
        def check_call(choice_of, names, seed):
            choice = s.post("/v1/chat/completions", {**ask, "seed": seed, "tool_choice": choice_of})["choices"][0]
            calls = choice["message"].get("tool_calls") or []
            expect(calls or choice_of == "auto" or choice["finish_reason"] == "length", choice)
            for call in calls if choice["finish_reason"] == "tool_calls" else ():
                expect(call["function"]["name"] in names, call)
                expect(call["function"]["name"] != "add" or valid([(numbers, call["function"]["arguments"])])[0], call)
        for seed in range(3):
            check_call("auto", ("add", "now"), seed)
            check_call("required", ("add", "now"), seed)
            check_call({"type": "function", "function": {"name": "add"}}, ("add",), seed)
        bad = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
        s.refuses("/v1/chat/completions", {**ask, "tools": bad}, "tools[0].function.parameters", "not at #")
        for parameters, strict in (({}, True), ({"enum": [5, {"a": 1}]}, True), ({"type": "array"}, False), ({"type": "integer"}, False)):
            any_tool = [{"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}]
            body = {**ask, "tools": any_tool, "tool_choice": "required", "temperature": 1, "max_tokens": 100}
            for seed in range(3):
                choice = s.post("/v1/chat/completions", {**body, "seed": seed})["choices"][0]
                for call in choice["message"]["tool_calls"] if choice["finish_reason"] == "tool_calls" else ():
                    expect(isinstance(json.loads(call["function"]["arguments"]), dict), choice)
        bad = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}]
        s.refuses("/v1/chat/completions", {**ask, "tools": bad}, "tools[0].function.parameters", "allows no value")
        explodes = {"type": "object", "properties": {"a": {"pattern": "(a|b)*a(a|b){20}", "maxLength": 1000},
                                                     "b": {"pattern": "(((.{0,50}b?){0,50}c?){0,50}d?){0,50}", "maxLength": 3000}}}
        for strict in (False, True):  # no other schema can take its place: nothing more is made of a grammar that gave up
            heavy = [{"type": "function", "function": {"name": "f", "strict": strict, "parameters": explodes}}, tools[1]]
            for choice_of in ("required", "auto")[:1 + strict]:
                s.refuses("/v1/chat/completions", {**ask, "tools": heavy, "tool_choice": choice_of}, "tools[0].function.parameters",
                          "too large")


def each_call(text):
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + text + "{% endfor %}"


ARGUMENTS, LAST = "{% for k, v in f.arguments.items() %}", "{{ ', ' if not loop.last }}{% endfor %}"
PLAIN = "{{ v if v is string else v | tojson }}"  # as GLM's, MiniMax's and DeepSeek's templates have it
GEMMA = ("{% macro put(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:"
         "{{ put(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% else %}{{ v }}{% endif %}{% endmacro %}")
FORMS = {  # calls that are no JSON, as published templates write them: of message m, and what a model says; marks of thoughts
    "Qwen3-Coder": (each_call("<tool_call>\n<function={{ f.name }}>\n" + ARGUMENTS + "<parameter={{ k }}>\n{{ v | string }}\n</parameter>\n"
                              "{% endfor %}</function>\n</tool_call>"),
                    "<tool_call>¦\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n¦</tool_call>",
                    None),
    "GLM": (each_call("\n<tool_call>{{ f.name }}\n" + ARGUMENTS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + PLAIN + "</arg_value>\n"
                      "{% endfor %}</tool_call>"),
            "<tool_call>¦add\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n¦</tool_call>",
            ("<think>", "</think>")),
    "Seed": (each_call("<seed:tool_call>\n<function={{ f.name }}>\n" + ARGUMENTS + "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}"
                       "</function>\n</seed:tool_call>"),
             "<seed:tool_call>¦\n<function=add>\n<parameter=a>5</parameter>\n<parameter=b>x</parameter>\n</function>\n¦</seed:tool_call>",
             ("<seed:think>", "</seed:think>")),
    "MiniMax": ("<minimax:tool_call>\n" + each_call('<invoke name="{{ f.name }}">\n' + ARGUMENTS + '<parameter name="{{ k }}">' + PLAIN +
                                                    "</parameter>\n{% endfor %}</invoke>\n") + "</minimax:tool_call>",
                '<minimax:tool_call>¦\n<invoke name="add">\n<parameter name="a">5</parameter>\n<parameter name="b">x</parameter>\n</invoke>\n¦'
                "</minimax:tool_call>", ("<think>", "</think>")),
    "DeepSeek V3.2": ("<｜DSML｜function_calls>\n" + each_call(
        '<｜DSML｜invoke name="{{ f.name }}">\n' + ARGUMENTS + """<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">"""
        + PLAIN + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n") + "</｜DSML｜function_calls>",
        '<｜DSML｜function_calls>¦\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">5</｜DSML｜parameter>\n'
        '¦<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n¦</｜DSML｜function_calls>',
        ("<think>", "</think>")),
    "Gemma 4": (GEMMA.replace("QUOTE", '<|"|>') + each_call("<|tool_call>call:{{ f.name }}{{ put(f.arguments) }}<tool_call|>"),
                '<|tool_call>¦call:add{a:5,b:<|"|>x<|"|>}¦<tool_call|>', ("<|channel>thought", "<channel|>")),
    "FunctionGemma": (GEMMA.replace("QUOTE", "<escape>") +
                      each_call("<start_function_call>call:{{ f.name }}{{ put(f.arguments) }}<end_function_call>"),
                      "<start_function_call>¦call:add{a:5,b:<escape>x<escape>}¦<end_function_call>", None),
    "LFM2": (each_call("<|tool_call_start|>[{{ f.name }}(" + ARGUMENTS + """{{ k }}={{ "'" + v + "'" if v is string else v | string }}""" + LAST +
                       ")]<|tool_call_end|>"), '<|tool_call_start|>¦[add(a=5, b="x")]¦<|tool_call_end|>', ("<think>", "</think>")),
    "Olmo 3": (each_call("<function_calls>\n{{ f.name }}(" + ARGUMENTS + """{{ k }}={{ "'" + v + "'" if v is string else v | tojson }}""" + LAST +
                         ")\n</function_calls>"), '<function_calls>¦\nadd(a=5, b="x")\n¦</function_calls>', ("<think>", "</think>")),
    "pythonic": (each_call("[{{ f.name }}(" + ARGUMENTS + '{{ k }}="{{ v }}"' + LAST + ")]"), '[add(a=5,¦ b="x")]', None),
}


def form_template(name):
    """A chat template that writes calls in this form. Its prompts end inside of a thought, or behind an empty one."""
    from test_answers import TURNS
    written, _, marks = FORMS[name]
    begun = f"{marks[0]}\n{{% if not enable_thinking %}}\n{marks[1]}\n\n{{% endif %}}" if marks else ""
    return TURNS.replace("CALLS", written).replace("BEGUN", begun)


def test_strict_calls_behind_a_preamble(folder):
    """Whether the mark of a call is a token or spelled, what follows it keeps the schema, and no text has that mark. Published
    templates, and short ones of formats that have none here, thinking on and off where they have thoughts."""
    needs("serve", "formats", "families")
    from test_answers import CALLS, TURNS
    from test_chat import speaker
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"], "additionalProperties": False}
    ask = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 200,
           "tools": [{"type": "function", "function": {"name": "add", "description": "d", "parameters": schema, "strict": True}}]}
    hermes = ["<tool_call>", '\n{"name": "add", "arguments": ', "ARGUMENTS", "}\n", "</tool_call>", "<|im_end|>"]
    mistral = ["[TOOL_CALLS]", '[{"name": "add", "arguments": ', "ARGUMENTS", ', "id": "123456789"}]', "</s>"]
    calls = {"Qwen2.5": ("Qwen2.5", None, hermes), "Qwen3": ("Qwen3", None, hermes), "Mistral Nemo": ("Mistral Nemo", None, mistral)}
    for row in ("DeepSeek V3.1", "DeepSeek", "Kimi", "Phi-4-mini", "Granite", "Mistral, named"):
        written, answer, tokens = CALLS[row]
        before, behind = re.split(r'{"place": ?"Bern"}', re.sub(r"\bf\b", "add", answer))
        close = tokens[-1] if behind.endswith(tokens[-1]) else ""
        said = [tokens[0], before.removeprefix(tokens[0]), "ARGUMENTS", behind.removesuffix(close), close, "<|im_end|>"]
        calls[row] = "SmolLM2", TURNS.replace("CALLS", written).replace("BEGUN", ""), [text for text in said if text]
    for row, (_, said, marks) in FORMS.items():
        for thinks in (False, True)[:1 + bool(marks)]:
            calls[row + ", thinking" * thinks] = "SmolLM2", form_template(row), [*said.split("¦"), "<|im_end|>"]
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = dict(zip([*plain, *(b for b in range(256) if b not in plain)], map(chr, [*plain, *range(256, 324)])))

    def check(name, spelled, good):
        model, template, said = calls[name]
        marks = [part for part in (said[0], said[-2]) if re.fullmatch(r"[<[]\S+[]>]", part)]
        said = [part.replace("ARGUMENTS", '{"a": 5, "b": "x"}') for part in said]
        said = [part if good else re.sub(r"\b5\b", "50", part) for part in said]
        thought = ["Hm. ", FORMS[name.removesuffix(", thinking")][2][1]] if name.endswith(", thinking") else []
        preamble = ["I look. "] if name != "pythonic" else []  # its calls begin an answer
        if spelled:
            said = [half for part in said for half in ((part[:5], part[5:]) if part in marks else (part,))]
        made = speaker(model, folder, *thought, *preamble, *said, template=template)
        path = made / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        for token in tokenizer["added_tokens"]:  # what the model says is in its vocabulary
            if token["content"] in said and token["content"] not in {*marks, said[-1]}:
                tokenizer["model"]["vocab"]["".join(map(letters.get, token["content"].encode()))] = token["id"]
        kept = [t for t in tokenizer["added_tokens"] if t["content"] not in said or t["content"] in {*marks, said[-1]}]
        tokenizer["added_tokens"] = [t for t in kept if not (spelled and t["content"] in marks)]
        path.write_text(json.dumps(tokenizer))
        with Server(made, program=helpers.PLAIN) as s:
            choice = s.post("/v1/chat/completions", {**ask, "chat_template_kwargs": {"enable_thinking": bool(thought)}})["choices"][0]
        expect((choice["message"]["content"] or "").strip() == "".join(preamble).strip() or not good, choice)
        expect(choice["message"].get("reasoning_content", "").strip() == "".join(thought[:1]).strip(), choice)
        for call in choice["message"].get("tool_calls") or []:
            expect(valid([(schema, call["function"]["arguments"])])[0], choice)
        expect(choice["finish_reason"] == "tool_calls" or not good, choice)
    each([(name, spelled, good) for name in calls for spelled in (True, False) for good in (True, False)
          if name != "Kimi" or not spelled], check)  # Kimi's calls are told by the tokens


def test_calls_in_other_forms_keep_their_schemas(folder):
    """Calls that are no JSON, by a model of random weights, with marks that are tokens, thinking on and off: texts with all kinds of
    limits, optional parameters, and other functions. What a form cannot hold is refused."""
    needs("serve", "formats")
    from test_answers import CALLS, model
    text = {"type": "string", "maxLength": 5}
    schema = {"type": "object", "$defs": {"kind": {"enum": ["1", "true", "two\nlines"]}}, "additionalProperties": False,
              "properties": {"whole": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"$ref": "#/$defs/kind"},
                             "maybe": {"anyOf": [text, {"type": "null"}]}, "either": {"type": ["integer", "boolean", "string"], "maxLength": 3}, "list": {"type": "array", "items": text, "maxItems": 2},
                             "deep": {"type": "object", "properties": {"x": {"type": "boolean"}, "y": text}, "required": ["x"]},
                             "code": {"type": "string", "pattern": "^[0-9]{2}"}, "day": {"type": "string", "format": "date"},
                             "off": {"enum": [False, None, 1.5]}},
              "required": ["whole", "kind", "maybe", "either", "list", "code"]}
    schema["properties"]["code"]["maxLength"] = 6

    def tool(name, parameters, strict):
        return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, "strict": strict}}
    add = tool("add", schema, True)
    kinds = {"type": "object", "properties": {"a": {"enum": ["5", "true"]}}, "required": ["a"], "additionalProperties": False}
    one = {"anyOf": [{"type": "object"}, {"enum": ["5", "true"]}]}
    found = [{"$defs": {"k": kinds}, "$ref": "#/$defs/k"}, {"allOf": [kinds, {"properties": {"b": {"type": "string"}}}]},
             {"type": "object", "additionalProperties": {"enum": ["5"]}},
             {"type": "object", "$defs": {"/": {"a b": kinds["properties"]["a"]}}, "required": ["a"],
              "properties": {"a": {"$ref": "#/$defs/~1/a%20b"}}},
             {"type": "object", "properties": {"b": one, "a": {"$ref": "#/properties/b/anyOf/1"}}, "required": ["a"]}]
    others = [tool("any", {"type": "object"}, False), tool("bare", {"type": "object", "properties": {}}, True)]
    xml = ("Qwen3-Coder", "GLM", "Seed", "MiniMax", "DeepSeek V3.2")
    refused = (("x", {"not": {}}, "not at #/properties/x", FORMS), ("a b", {}, "a b at #", FORMS),
               ("x", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}, "type at #/properties/x", xml),
               ("x", {"enum": ["</｜DSML｜parameter>", "</｜DSML｜function_calls>"]}, "allows no value", xml[4:]))
    ended, placed = dict.fromkeys(FORMS, 0), [0] * len(found)

    def check_form(name):
        marks = FORMS[name][2] or ()
        made = model(folder, form_template(name), [*CALLS[name][2], *(mark for mark in marks if "thought" not in mark)])
        tokenizer = json.loads((made / "tokenizer.json").read_text())
        end = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|im_end|>")
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
        with Server(made, program=helpers.PLAIN) as s:
            ask = {"messages": [{"role": "user", "content": "x"}], "temperature": 1, "max_tokens": 900}
            for i in range(12):
                body = {**ask, "seed": i, "tools": [add, *others], "tool_choice": "required" if i % 3 else
                        {"type": "function", "function": {"name": "add"}}, "chat_template_kwargs": {"enable_thinking": i % 2 > 0}}
                choice = s.post("/v1/chat/completions", body)["choices"][0]
                calls = choice["message"].get("tool_calls") or []
                expect(len(calls) == 1 or choice["finish_reason"] == "length", choice)
                for call in calls if choice["finish_reason"] == "tool_calls" else ():
                    given = call["function"]["arguments"]
                    expect(call["function"]["name"] != "add" or valid([(schema, given)])[0], choice)
                    expect(call["function"]["name"] != "bare" or given == "{}", choice)
                    ended[name] += call["function"]["name"] == "add"
            for i in range(2 * len(found)):  # where the schema of an argument may stand: a text like 5 is a text
                parameters = found[i // 2]
                body = {**ask, "seed": i, "tools": [tool("f", parameters, True)], "tool_choice": "required", "max_tokens": 150,
                        "chat_template_kwargs": {"enable_thinking": False}}
                choice = s.post("/v1/chat/completions", body)["choices"][0]
                for call in choice["message"]["tool_calls"] if choice["finish_reason"] == "tool_calls" else ():
                    expect(valid([(parameters, call["function"]["arguments"])])[0], choice)
                    placed[i // 2] += call["function"]["arguments"] != "{}"
            for key, value, why, forms in refused:
                bad = tool("f", {"type": "object", "properties": {key: value}, "required": [key]}, True)
                if name in forms:
                    s.refuses("/v1/chat/completions", {**ask, "tools": [bad]}, "tools[0].function.parameters", why)
    each([(name,) for name in FORMS], check_form)
    expect(all(ended.values()) and all(placed), (ended, placed))


def test_client_libraries():
    """openai, instructor, langchain, pydantic-ai and openai-agents read answers as the types that they asked for."""
    needs("serve")
    python = os.environ.get("SCHEMA_PYTHON")
    if not python:
        raise Skip("needs SCHEMA_PYTHON with instructor, langchain-openai, pydantic-ai-slim[openai] and openai-agents")
    with Server(TESTS.parent / "models" / "tiny", program=helpers.PLAIN) as s:
        p = subprocess.run([python, TESTS / "schema_clients.py", f"http://127.0.0.1:{s.port}"], capture_output=True, text=True,
                           timeout=helpers.patience(120))
    expect(not p.returncode, (p.stdout + p.stderr)[-1500:])


def test_every_format_keeps_schemas(folder):
    """Other formats than harmony, thinking on and off: the text behind the thought, and calls as each format writes them."""
    needs("serve", "formats", "families")
    from test_chat import MODELS, folder_of
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": schema, "strict": True}}]
    whatever = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}, "strict": True}}]
    text = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    ended = {"text": 0, "call": 0}

    def check_format(name):
        model = folder_of(name, folder)
        for file in ("config.json", "model.safetensors"):
            (model / file).symlink_to(PARROT / file)
        with Server(model, program=helpers.PLAIN) as s:
            for thinks in (True, False):
                for kind, body in (("text", text), ("call", {"tools": tools, "tool_choice": "required"}), ("auto", {"tools": tools}),
                                   ("any", {"tools": whatever, "tool_choice": "required"})):
                    request = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "seed": 1, **body,
                               "chat_template_kwargs": {"enable_thinking": thinks}}
                    try:
                        choice = s.post("/v1/chat/completions", request)["choices"][0]
                    except AssertionError as e:  # it has no tools, no known calls, or always thinks
                        expect("status 400" in str(e) and any(w in str(e) for w in ("tools", "reasoning_effort", "how this model writes")), e)
                        continue
                    calls = choice["message"].get("tool_calls") or []
                    if kind == "text" and choice["finish_reason"] == "stop":
                        expect(valid([(schema, choice["message"]["content"])])[0], choice)
                        ended["text"] += 1
                    for call in calls if choice["finish_reason"] == "tool_calls" else ():
                        expect(valid([({"type": "object"} if kind == "any" else schema, call["function"]["arguments"])])[0], choice)
                    ended["call"] += kind == "call" and choice["finish_reason"] == "tool_calls"
                    expect(kind != "call" or calls or choice["finish_reason"] == "length", choice)
    each([(name,) for name in MODELS], check_format)
    expect(ended["text"] >= 30 and ended["call"] >= 15, ended)
