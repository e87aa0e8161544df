"""infer.1 says what the program says: each command, each of its options, each exit code."""
import re
import shutil
import subprocess

from helpers import TESTS, Skip, expect, infer, same, needs

PAGE = TESTS.parent / "commands" / "infer.1"


def test_commands():
    """Letter, name and whether it takes a value, of every option of every command, in both directions."""
    needs("commands", "serve")
    told = {}
    for command in re.findall(r"^  infer (\w+)", infer("--help").text, re.M):
        rows = re.findall(r"^ +(?:-(\w), )?--([\w-]+)( \S)?", infer(command, "--help").text, re.M)
        told[command] = sorted((letter, name, bool(value)) for letter, name, value in rows)
    written = {}
    for section in re.split(r"^\.Ss infer ", PAGE.read_text().split("\n.Sh ENVIRONMENT")[0], flags=re.M)[1:]:
        rows = re.findall(r"^\.It Fl (?:(\w) , Fl )?-([\w-]+)( Ar)?", section, re.M)
        written[section.split()[0]] = sorted((letter, name, bool(value)) for letter, name, value in rows)
    same(sorted(written), sorted(told), "commands")
    for command, options in told.items():
        same(written[command], options, f"options of {command}")


def test_exit_codes():
    if not PAGE.exists():
        raise Skip("needs commands/")
    codes = re.findall(r"^ *[A-Z_]+ = (\d+)", (TESTS.parent / "base.h").read_text(), re.M)
    status = PAGE.read_text().split(".Sh EXIT STATUS")[1].split(".Sh")[0]
    same(re.findall(r"^\.It (\d+)$", status, re.M), codes, "exit codes")


def test_lint():
    if not PAGE.exists():
        raise Skip("needs commands/")
    if not shutil.which("mandoc"):
        raise Skip("needs mandoc")
    p = subprocess.run(["mandoc", "-Tlint", PAGE], capture_output=True, text=True)
    expect(p.returncode == 0 and not p.stdout, p.stdout)
