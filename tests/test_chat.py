"""Chat formats other than harmony: prompts equal those of the published templates, text never becomes a control token, and
answers become thoughts, text and calls. Each format runs with the parrot's vocabulary and the model's control tokens."""
import json
import tarfile

from helpers import GOLDENS, PARROT, PLAIN, Skip, data, each, expect, ids_of, infer, read_json, refused, render, same

MODELS = {m["model"]: m for m in read_json(GOLDENS / "chat.json")}
TEXT = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def folder_of(model, folder, template=None):
    """A model folder with the parrot's vocabulary; without `template` the chat template has what tells it apart."""
    m = MODELS[model]
    made = folder / model.replace(" ", "_")
    made.mkdir(exist_ok=True)
    tokenizer = read_json(PARROT / "tokenizer.json")
    first = min(t["id"] for t in tokenizer["added_tokens"])
    tokenizer["added_tokens"] = [{**tokenizer["added_tokens"][0], "id": first + i, "content": name,
                                  "special": name not in TEXT} for i, name in enumerate(m["controls"])]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template or m["has"]}))
    return made


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
        if case["name"] != "control tokens":
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
