"""What json/ makes of schemas, beside the package jsonschema."""
import json
import os
import random
import subprocess
import sys

import helpers
import schemas
from helpers import Skip, expect

NEEDS = ("json",)
SCHEMAS = 500


def python():
    """A Python that has jsonschema."""
    for path in (os.environ.get("OPENAI_PYTHON"), sys.executable):
        if path and not subprocess.run([path, "-c", "import jsonschema"], capture_output=True).returncode:
            return path
    raise Skip("needs the package jsonschema")


def valid(pairs):
    """Which of the pairs (schema, JSON text) jsonschema finds valid."""
    code = ("import json, sys\nfrom jsonschema import Draft202012Validator as V\n"
            "print(json.dumps([V(s).is_valid(json.loads(t)) for s, t in json.load(sys.stdin)]))")
    out = subprocess.run([python(), "-c", code], input=json.dumps(pairs), capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


def grammars(requests):
    """What tests/schemas.c says of each."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    p = subprocess.run([helpers.BUILD / "reference" / "schemas"], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in p.stdout.split("\n")[:-1]]


def check(made, samples):
    """Values that satisfy their schema can be written; random texts that can be written satisfy it."""
    told = grammars([{"schema": schema, "texts": texts, "samples": samples} for schema, texts in made])
    found = []
    for (schema, texts), answer in zip(made, told):
        expect("error" not in answer, f"{answer.get('error')}: {json.dumps(schema)}")
        for text, accepted in zip(texts, answer["accepts"]):
            expect(accepted, f"{text} cannot be written: {json.dumps(schema)}")
        found += [(schema, text) for text in answer["samples"]]
    for (schema, text), ok in zip(found, valid(found)):
        expect(ok, f"{text[:300]} was written: {json.dumps(schema)}")
    expect(len(found) > samples * len(made) * 0.9, f"only {len(found)} texts")


def test_random_schemas():
    r = random.Random(int.from_bytes(os.urandom(4), "big"))
    made = []
    for _ in range(SCHEMAS):
        schema, make = schemas.make_root(r)
        made.append((schema, [schemas.written(r, value) for value in (make(r) for _ in range(4)) if value is not None]))
    pairs = [(schema, text) for schema, texts in made for text in texts]
    right = iter(valid(pairs))
    made = [(schema, [text for text in texts if next(right)]) for schema, texts in made]
    expect(sum(len(texts) for _, texts in made) > 3 * SCHEMAS, "too few values")
    check(made, 4)
