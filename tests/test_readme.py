"""README.md agrees with the sources: its length, the files' lines, the messages it explains, the functions it names. And
what a build shows."""
import os
import re
import subprocess

from helpers import TESTS, each, expect, same

ROOT = TESTS.parent
README = (ROOT / "README.md").read_text()


def section(name):
    return README.split(f"\n## {name}\n")[1].split("\n## ")[0]


def sources(*patterns):
    return {path: path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))}


def test_length():
    lines = README.splitlines()
    expect(len(lines) <= 250, f"{len(lines)} lines")
    expect(all(command in lines[:20] for command in lines if command.startswith("./run.sh")), "commands come first")


def test_lines_of_files():
    """Each source is in the table, and its rounded number of lines is at most a tenth, or ten, off."""
    kinds = (".c", ".h", ".cu", ".cuh", ".html")
    names = [re.findall(r"`([^`]+)`", row[0]) for row in re.findall(r"^\| (.*?) \| ([\d,]+) \|", section("File by file"), re.M)]
    rooms = [name for row in names for name in row if name.endswith("/") and (ROOT / name).is_dir()]
    left = sources("*.c", "*.h", "*.cu", "*.cuh", *(f"{room}*{kind}" for room in rooms for kind in kinds))

    def check(cell, rounded):
        row = re.findall(r"`([^`]+)`", cell)
        here = all(name in rooms for name in row if name.endswith("/"))  # a build without a room says nothing of its row
        found = [path for name in row for path in ROOT.glob(f"{name}*" if name.endswith("/") else name)
                 if path.suffix in kinds]
        lines = sum(len(path.read_text().splitlines()) for path in found)
        expect(not here or abs(int(rounded.replace(",", "")) - lines) <= max(10, lines / 10), f"has {lines} lines")
        for path in found:
            left.pop(path, None)

    each(re.findall(r"^\| (.*?) \| ([\d,]+) \|", section("File by file"), re.M), check)
    expect(not left, f"not in the table: {[path.name for path in left]}")


def test_messages():
    """Each message of the section on troubleshooting is part of one that the program or its build can write."""
    text = "".join(sources("*.c", "*.cu", "*/*.c", "*/*.cuh", "Makefile", "run.sh").values())
    text = re.sub(r'"\s*\n\s*"', "", text)
    for message in re.findall(r"^\| `(.*?)` \|", section("Troubleshooting"), re.M):
        expect(message in text, f"nobody writes '{message}'")


def test_functions():
    """What the table of places names stands there."""
    gpu = "".join((ROOT / name).read_text() for name in ("infer.cu", "card.cu") + tuple(str(path) for path in ROOT.glob("*/*.cuh")))
    plain = (ROOT / "tests" / "reference.c").read_text()
    for row in re.findall(r"^\| [^`]*? \| (`.*) \|$", section("How a token is made"), re.M)[1:]:
        for cell, text in zip(row.split(" | "), (gpu, plain)):
            for name in re.findall(r"`(?:\w+::)?(\w+)(?:<\w+>)?`", cell):
                expect(re.search(rf"\b{name}\b", text), f"no {name}")


def test_a_build_shows_a_line_a_file():
    """With V=1 the commands."""
    alone = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "EXTENSIONS")}  # of a make that runs this
    for more in ([], ["V=1"]):
        shown = subprocess.run(["make", "-Bn", *more, "build/reference/base.o"], cwd=ROOT, env=alone, capture_output=True,
                               text=True).stdout
        line = next(line for line in shown.splitlines() if "base.c" in line)
        same(line.startswith('echo "cc base.c"'), not more, line)
