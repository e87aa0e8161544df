"""Runs the tests: build/asan/unit, and every function test_* of the modules test_*.py here.

    python3 tests/run.py [--fetch] [--gpu] [--emulated] [WORD]...     (WORD: tests with it in their name)

--gpu runs build/cuda/gpu too; --emulated build/emulated/gpu, those of the same tests that a processor can do.

Needs the Python of the system, 3.9 or later, and nothing else. Some tests need published files, which are not shipped
(helpers.PUBLISHED): tests find them below TEST_DATA or in the hub's cache, where --fetch puts them. A test is a
function; one with a parameter gets a fresh folder. It returns (ok), raises AssertionError (FAIL; the lines after the
first are details) or helpers.Skip. Tests run build/asan/infer-reference, whose sanitizers' reports are failures; those
with a limit of time run ./infer-reference.
"""
import sys

sys.dont_write_bytecode = True

import importlib
import inspect
import os
import re
import signal
import subprocess
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers


def run_c(program, word_in):
    """Runs C tests, which print a line each. Yields (state, rest of the line) of those with a word in it."""
    prefix = "emulated " if program.parent.name == "emulated" else ""
    names = re.findall(r'\brun\([^"]*"([^"]+)"', (helpers.TESTS / f"{program.name}.c").read_text())
    if not any(word_in(prefix + name) for name in names):
        return
    if not program.exists():
        yield "FAIL", f"{program} is missing: make asan, make test-gpu, make build/emulated/gpu"
        return
    try:
        p = subprocess.run([program], cwd=helpers.TESTS.parent, env=helpers.environment(TEST_DATA=helpers.DATA),
                           timeout=600, capture_output=True, text=True, errors="replace")
    except subprocess.TimeoutExpired:
        yield "FAIL", f"{program.name}: still running after 600 s"
        return
    failed = False
    for line in p.stdout.splitlines():
        state, _, rest = line.partition(" ")
        failed |= state == "FAIL"
        if state in ("ok", "FAIL", "skip") and word_in(prefix + rest):
            yield state, prefix + rest
    report = helpers.SANITIZER.search(p.stderr)
    if report or (p.returncode and not failed) or p.returncode < 0:
        yield "FAIL", f"{program.name}: exit code {p.returncode}: {report[0] if report else p.stderr[-500:].strip()}"


def fetch():
    """Downloads the published files that tests need and that are missing here into the user's hub cache."""
    for place in helpers.missing_data():
        repository, files = helpers.PUBLISHED[place]
        wanted = [part for name in files for part in ("--include", name)]
        if subprocess.run([helpers.PLAIN, "download", repository, *wanted], stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"{repository} could not be fetched; without --fetch the tests that need it are skipped")
    helpers.link_data()


def run_one(function):
    try:
        if inspect.signature(function).parameters:
            with tempfile.TemporaryDirectory(prefix="infer-test-") as folder:
                function(Path(folder))
        else:
            function()
        return "ok", ""
    except helpers.Skip as e:
        return "skip", str(e)
    except AssertionError as e:
        return "FAIL", str(e) or traceback.format_exc(limit=-1).strip().replace("\n", "; ")
    except Exception:
        return "FAIL", traceback.format_exc().strip()


def modules():
    for path in sorted(helpers.TESTS.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name, function in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(function) and function.__module__ == path.stem:
                yield f"{path.stem[5:]}.{name[5:]}", function


def main():
    # a shell's background jobs ignore SIGINT, and the programs that tests start would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    words, count = [word for word in sys.argv[1:] if word not in options], {"ok": 0, "FAIL": 0, "skip": 0}
    c_tests = [helpers.CHECKED.parent / "unit"]
    if set(options) - {"--fetch", "--gpu", "--emulated"}:
        sys.exit(__doc__.split("\n\n")[1])
    for option, build in (("--gpu", "cuda"), ("--emulated", "emulated")):
        if option in options:
            c_tests.append(helpers.TESTS.parent / "build" / build / "gpu")

    def word_in(name):
        return not words or any(word in name for word in words)

    def report(state, line):
        count[state] += 1
        print(state, line.replace("\n", "\n    "), flush=True)

    for program in (helpers.CHECKED, helpers.PLAIN):
        if not program.exists():
            sys.exit(f"{program} is missing: make asan reference")
    if "--fetch" in options:
        fetch()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = [(name, pool.submit(run_one, function)) for name, function in modules() if word_in(name)]
        for program in c_tests:
            for result in run_c(program, word_in):
                report(*result)
        for name, future in tests:
            state, why = future.result()
            report(state, f"{name}: {why}" if why else name)
    if count["skip"]:
        cure = "; ./run.sh test --fetch gets the published files that tests need, 31 MB"
        print(f"{count['skip']} skipped{cure if helpers.missing_data() else ''}")
    print(f"{count['ok']} passed, {count['FAIL']} failed")
    return count["FAIL"] > 0


if __name__ == "__main__":
    sys.exit(main())
