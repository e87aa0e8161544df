"""What notebooks/ says of the code: its picture names kernels that exist, its notebooks were executed from top to bottom.
`make notebooks` executes them again."""
import json
import re
import subprocess
import sys

from helpers import TESTS, each, expect, same

ROOT, NOTEBOOKS = TESTS.parent, TESTS.parent / "notebooks"


def test_picture_of_a_block():
    source = (ROOT / "infer.cu").read_text()
    kernels = set(re.findall(r"__global__ void (?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", source, flags=re.S))
    named = {name for name in re.findall(r"`(\w+)`", (NOTEBOOKS / "block.py").read_text())}
    expect(len(named) >= 10 and named <= kernels, f"no kernels: {named - kernels}")
    drawn = subprocess.run([sys.executable, NOTEBOOKS / "block.py"], capture_output=True, check=True).stdout
    same(drawn, (NOTEBOOKS / "block.svg").read_bytes(), "block.svg: python3 notebooks/block.py > notebooks/block.svg")


def test_outputs_are_those_of_one_run():
    def check(name):
        cells = [c for c in json.loads((NOTEBOOKS / name).read_text())["cells"] if c["cell_type"] == "code"]
        same([c["execution_count"] for c in cells], list(range(1, len(cells) + 1)), "numbers of executed cells")
        expect(not any(o["output_type"] == "error" for c in cells for o in c["outputs"]), "an error")
    each([(path.name,) for path in sorted(NOTEBOOKS.glob("*.ipynb"))], check)
