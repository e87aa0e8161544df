"""Does this engine continue seven harmony prompts as OpenAI's own code does with the real gpt-oss-20b?

Usage: python3 tests/verify.py INFER MODEL      (`make verify MODEL=DIR` calls it)

tests/goldens/greedy.json has the prompts and the first eight greedy tokens of openai/gpt-oss. Each prompt is run once,
followed by its eight tokens, and the likeliest token after each position is compared.
"""

import json
import pathlib
import subprocess
import sys


def likeliest(infer, model, ids):
    """The most likely next token after each of ids, with its logit."""
    command = [infer, "logits", model, "--all", "--top", "1", "--ids", ",".join(map(str, ids))]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if not line.startswith("after ")]


def main():
    infer, model = sys.argv[1:]
    golden = json.loads((pathlib.Path(__file__).parent / "goldens" / "greedy.json").read_text())
    wrong = 0
    for prompt in golden["prompts"]:
        expected, n = prompt["greedy_ids"], len(prompt["ids"])
        try:
            found = likeliest(infer, model, prompt["ids"] + expected[:-1])[n - 1:]
        except subprocess.CalledProcessError as e:
            sys.exit(e.returncode)
        same = sum(a == b for a, b in zip(expected, found))
        wrong += same != len(expected)
        print(f"{prompt['name']}: {same} of {len(expected)}" + ("" if same == len(expected) else f", expected {expected}, found {found}"), flush=True)
    print("verified" if not wrong else f"{wrong} of {len(golden['prompts'])} prompts differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
