"""What the test modules share: running the program, a scripted terminal, model folders with one thing changed."""
import atexit
import fcntl
import functools
import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parent
FIXTURES, GOLDENS, PARROT = TESTS / "fixtures", TESTS / "goldens", TESTS / "fixtures" / "parrot"
CORE = "--core" in sys.argv                                   # the build without rooms (make EXTENSIONS=no)
BUILD = TESTS.parent / "build" / "core" if CORE else TESTS.parent / "build"
PLAIN = (BUILD if CORE else TESTS.parent) / "infer-reference"         # fast enough for limits of time
# With sanitizers; the core's sources run with them in the build with rooms, and in the unit tests.
LONG = "--long" in sys.argv                                    # more of the same
CHECKED = PLAIN if CORE or "--quick" in sys.argv else BUILD / "asan" / "infer-reference"
DATE = "2025-06-28"                                            # of the parrot's conversations
SANITIZER = re.compile(r"(?:ERROR|WARNING): \w+Sanitizer[^\n]*|runtime error:[^\n]*")

HOME = Path(tempfile.mkdtemp(prefix="infer-test-"))  # so that tests read and write nothing of the user's
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
(HOME / "suppressions").write_text("leak:wcsdup\n")  # libedit keeps the names of added functions


class Skip(Exception):
    """Raised by a test that cannot run here, with the reason."""


def has(*rooms):
    """Has this build these rooms?"""
    return all(not CORE and (TESTS.parent / room).is_dir() for room in rooms)


def needs(*rooms):
    """Skips a test that needs a room which this build does not have."""
    for room in rooms:
        if not has(room):
            raise Skip(f"needs {room}/")


# ---- published files, which are not shipped

PUBLISHED = {  # place below TEST_DATA: the hub's repository, or None, and the files of it that tests need
    "gpt-oss-20b": ("openai/gpt-oss-20b", ["config.json", "model.safetensors.index.json", "tokenizer.json"]),
    "models/TinyStories-656K": ("raincandy-u/TinyStories-656K",
                                ["config.json", "model.safetensors", "tokenizer.json"]),
    "models/stories260K": (None, ["config.json", "model.safetensors", "tokenizer.json"]),
    "families.tar.xz": (None, []), "configs": (None, []), "chat_templates": (None, [])}
DATA = HOME / "data"  # links to the published files that are here, at the same places


def snapshots(repository):
    """The snapshots of a repository in the user's hub cache."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    return cache.absolute().glob(f"models--{repository.replace('/', '--')}/snapshots/*")


def missing_data():
    """The places of published files that are missing here and that the hub has."""
    return [place for place, (repository, _) in PUBLISHED.items() if repository and not (DATA / place).exists()]


def link_data():
    for place, (repository, files) in PUBLISHED.items():
        if (DATA / place).exists():
            continue
        sources = [Path(os.environ["TEST_DATA"], place).absolute()] if os.environ.get("TEST_DATA") else []
        sources += snapshots(repository) if repository else []
        found = next((s for s in sources if s.exists() and all((s / name).exists() for name in files)), None)
        if found:
            (DATA / place).parent.mkdir(parents=True, exist_ok=True)
            (DATA / place).symlink_to(found)


def data(place):
    """The folder of a published model. Skips the test if it is neither in TEST_DATA nor in the hub's cache."""
    path = DATA / place
    if not path.exists():
        raise Skip(f"needs {PUBLISHED[place][0] or place + ' in TEST_DATA'}")
    return path


link_data()


# ---- limits of time

CORES = len(os.sched_getaffinity(0))
COMPRESSED = 0.26  # seconds that slowness() takes where limits of time were chosen


@functools.lru_cache(maxsize=None)
def slowness():
    """How many times longer the machine takes than the one where limits of time were chosen, at least 1: by the clock,
    and in processor time. Every core compresses the same text."""
    text = b"".join(b"%d," % (i * i % 9973) for i in range(1 << 19))
    began, used = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(zlib.compress, [text] * CORES))
    clock, processor = time.monotonic() - began, (time.process_time() - used) / CORES
    return max(clock / COMPRESSED, 1), max(processor / COMPRESSED, 1)


def patience(seconds):
    """A limit for what takes no more than this on an idle machine: only what hangs meets it."""
    return 5 * seconds * slowness()[0]


def until(true, what, seconds=60):
    """Waits until true()."""
    limit = time.monotonic() + patience(seconds)
    while not true():
        expect(time.monotonic() < limit, f"not {what} after {patience(seconds):.0f} s")
        time.sleep(0.005)


def expect(condition, message):
    if not condition:
        raise AssertionError(message)


def same(found, expected, what=""):
    """Fails if they differ, and shows the first difference."""
    if found == expected:
        return
    if isinstance(found, (str, bytes, list)) and isinstance(expected, type(found)):
        i = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
        raise AssertionError(f"{what} differs at {i}: {found[max(i - 20, 0):i + 60]!r}, "
                             f"expected {expected[max(i - 20, 0):i + 60]!r}")
    raise AssertionError(f"{what} is {found!r}, expected {expected!r}")


def each(cases, check):
    """Runs check(*case) for each case, a tuple that begins with a name. Fails at the end with all that failed."""
    failed, n = [], 0
    for case in cases:
        n += 1
        try:
            check(*case)
        except AssertionError as e:
            failed.append(f"{case[0]}: {e}")
    if failed:
        more = [f"and {len(failed) - 10} more"] if len(failed) > 10 else []
        raise AssertionError("\n".join([f"{len(failed)} of {n} cases"] + failed[:10] + more))


# ---- running the program

def environment(**more):
    kept = {name: os.environ[name] for name in ("PATH", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
            if name in os.environ}
    # their own exit code: nobody takes a report for an ordinary failure
    sanitizers = {"ASAN_OPTIONS": "exitcode=99", "UBSAN_OPTIONS": "exitcode=99",
                  "LSAN_OPTIONS": f"suppressions={HOME}/suppressions:print_suppressions=0"}
    return {**kept, **sanitizers, "HOME": str(HOME), "TERM": "xterm", "LC_ALL": "C.UTF-8",
            **{name: str(value) for name, value in more.items()}}


def check_sanitizers(text, code):
    report = SANITIZER.search(text)
    expect(not report and code != 99, f"sanitizer: {report[0] if report else 'no report'}")
    expect(code is None or code >= 0, f"killed by signal {-(code or 0)}")


def start(*args, program=CHECKED, cwd=None, env=None, **pipes):
    return subprocess.Popen([str(program), *(a if isinstance(a, bytes) else str(a) for a in args)], cwd=cwd,
                            env=environment(**(env or {})), **pipes)


def infer(*args, stdin=b"", code=0, seconds=60, cpu=None, **how):
    """Runs a command to its end. code: expected; None for any. Text on stdout is `.text`. cpu: seconds of processor time
    that it takes at most, three times as many are allowed; a busy machine does not change them."""
    pipe, limit = subprocess.PIPE, patience(seconds)
    with start(*args, stdin=pipe, stdout=pipe, stderr=pipe, **how) as p:
        if cpu:
            resource.prlimit(p.pid, resource.RLIMIT_CPU, (math.ceil(3 * cpu * slowness()[1]),) * 2)
        try:
            out, err = p.communicate(stdin.encode() if isinstance(stdin, str) else stdin, timeout=limit)
        except subprocess.TimeoutExpired:
            p.kill()
            raise AssertionError(f"still running after {limit:.0f} s: {' '.join(map(str, args))[:200]}") from None
    err = err.decode(errors="replace")
    check_sanitizers(err, p.returncode)
    expect(code is None or p.returncode == code, f"exit code {p.returncode}, expected {code}; stderr: {err[-300:]!r}")
    return SimpleNamespace(code=p.returncode, out=out, err=err, text=out.decode(errors="replace"))


def refused(*args, code=3, words=(), **how):
    """Expects this exit code and one line on stderr, which begins with `infer: ` and holds the words."""
    r = infer(*args, code=None, **how)
    expect(r.code == code, f"exit code {r.code}, expected {code}; stderr: {r.err[:300]!r}, stdout: {r.text[:80]!r}")
    hint = "infer: reading stdin until its end (Ctrl+D); </dev/null if there is none\n"
    r.err = r.err.replace(hint, "")  # of a busy machine: the text came after a second
    lines = r.err.splitlines()
    expect(len(lines) == 1 and lines[0].startswith("infer: "), f"not one line from infer: {r.err[:400]!r}")
    expect("\x1b" not in r.err and r.err.isprintable() or r.err.endswith("\n") and r.err[:-1].isprintable(),
           f"not printable: {r.err!r}")
    missing = [w for w in words if w not in r.err]
    expect(not missing, f"the message lacks {missing}: {r.err!r}")
    return r


def ids_of(r):
    return json.loads(r.out)


def render(conversation, model=PARROT, program=CHECKED):
    """The ids of a conversation's prompt."""
    return ids_of(infer("render", model, "--ids", stdin=json.dumps(conversation), program=program))


# ---- model folders

def copy_model(source, folder, config=None, name=None, keep_weights=True):
    """A new folder like `source`, with links to its weights. `config` replaces fields of config.json; None deletes."""
    made = Path(folder) / name if name else Path(tempfile.mkdtemp(dir=folder))
    made.mkdir(parents=True, exist_ok=not name)
    for file in Path(source).iterdir():
        if file.suffix == ".safetensors":
            if keep_weights and file.name.startswith("model"):
                (made / file.name).symlink_to(file.resolve())
        elif file.name != "conversations.json":
            shutil.copyfile(file, made / file.name)
    if config:
        write_json(made / "config.json", changed(read_json(made / "config.json"), config))
    return made


def changed(fields, changes):
    return {k: v for k, v in {**fields, **changes}.items() if v is not None}


def read_json(path):
    return json.loads(Path(path).read_text())


def write_json(path, value):
    Path(path).write_text(json.dumps(value))


def read_safetensors(path):
    """Header and data."""
    raw = Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def safetensors(header, content):
    """A file's bytes. The header is a dict, JSON text or bytes."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header)) + header + content


# ---- a terminal

# Starts a session whose controlling terminal is the one on stdin, then becomes the program.
LEADER = ("import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
          "os.execv(sys.argv[1], sys.argv[1:])")


class Terminal:
    """`infer` in a pseudo terminal, so wide that no line is wrapped. Tests match what it shows as text: lines end in
    \\n, escape sequences and what they erase are gone."""

    def __init__(self, *args, columns=400, program=CHECKED, cwd=None, seconds=60, **env):
        try:
            self.main, inner = pty.openpty()
        except OSError:
            raise Skip("needs a pseudo-terminal") from None
        self.seconds, self.raw, self.seen = patience(seconds), b"", 0
        self.resize(columns)
        env = environment(**{"HOME": tempfile.mkdtemp(dir=HOME), **env})  # the history is kept there
        self.process = subprocess.Popen([sys.executable, "-c", LEADER, str(program), *map(str, args)], stdin=inner,
                                        stdout=inner, stderr=inner, cwd=cwd, env=env)
        os.close(inner)

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        """Ends with Ctrl+D what still runs; it should be at a prompt."""
        try:
            if not kind and self.process.poll() is None:
                self.send("\x04")
                same(self.ended(), 0, "exit code after Ctrl+D")
            if not kind and self.process.returncode != -signal.SIGINT:
                check_sanitizers(self.text(), self.process.returncode)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.main)

    def resize(self, columns):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    def text(self):
        text = re.sub(r"[^\n]*\r\x1b\[K", "", self.raw.decode(errors="replace"))
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>78]", "", text)
        return re.sub(r"\r+\n", "\n", text)

    def read(self, seconds):
        """Reads what is there. False at the end of the program's output."""
        poll = select.poll()  # select() takes descriptors below 1024 only
        poll.register(self.main, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return True
        try:
            more = os.read(self.main, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.raw += more
        return bool(more)

    def wait(self, *texts):
        """Waits until the texts appear, in this order. Returns what was shown up to the last one."""
        begin, limit = self.seen, time.monotonic() + self.seconds
        for text in texts:
            while (at := self.text().find(text, self.seen)) < 0:
                more = self.read(max(limit - time.monotonic(), 0))
                at = self.text().find(text, self.seen)
                expect(at >= 0 or (more and time.monotonic() < limit),
                       f"{'no' if more else 'ended without'} {text!r} after {self.text()[self.seen:][-300:]!r}")
            self.seen = at + len(text)
        return self.text()[begin:self.seen]

    def send(self, text):
        os.write(self.main, text if isinstance(text, bytes) else text.encode())

    def prompt(self, prompt="You: "):
        """Waits for a prompt, and until the program reads key by key, which it does with terminal/. Returns what was shown
        before the prompt."""
        shown = self.wait(prompt)[:-len(prompt)]
        limit = time.monotonic() + self.seconds
        while has("terminal") and termios.tcgetattr(self.main)[3] & termios.ICANON:
            expect(time.monotonic() < limit, "the terminal still reads whole lines")
            time.sleep(0.001)
        return shown

    def interrupt(self):
        """Ctrl+C at the prompt, and the next prompt. Without terminal/ the key discards what waits to be shown, at
        times that prompt too; then it is pressed again."""
        for _ in range(1 if has("terminal") else 12):
            self.send("\x03")
            limit = time.monotonic() + patience(1)
            while "You: " not in self.text()[self.seen:] and time.monotonic() < limit:
                self.read(0.1)
            if "You: " in self.text()[self.seen:]:
                break
        return self.prompt()

    def ready(self):
        """Waits for the first prompt."""
        if has("terminal"):
            self.wait("/help lists")
        self.prompt()

    def say(self, line, *then):
        """Types a line, waits for the texts and the next prompt. Returns what appears after the line."""
        self.send(line + "\n")
        self.wait("\n")
        shown = self.wait(*then) if then else ""
        return shown + self.prompt()

    def ended(self):
        """Waits for the program's end. Returns the exit code."""
        limit = time.monotonic() + self.seconds
        while self.read(1):
            expect(time.monotonic() < limit, f"still running; it shows {self.text()[-300:]!r}")
        return self.process.wait(self.seconds)


def play(*args, **how):
    """A terminal with the parrot, greedy, at its first prompt."""
    t = Terminal("play", PARROT, "--temperature", "0", "--date", DATE, *args, **how)
    t.ready()
    return t


# ---- the parrot's conversations

CONVERSATIONS = {c["name"]: c for c in json.loads((PARROT / "conversations.json").read_text())}


def conversation(name, i=None, effort=None):
    """One of the parrot's conversations up to the prompt of turn i (its last), in the shape of chat completions, with
    its reasoning."""
    c = CONVERSATIONS[name]
    i = len(c["turns"]) - 1 if i is None else i
    messages = [{"role": "system", "content": c["system"]}] if c["system"] else []
    for k, turn in enumerate(c["turns"][:i + 1]):
        messages.append({"role": "user", "content": turn["user"]} if "user" in turn else
                        {"role": "tool", "tool_call_id": f"call_{k - 1}", "content": turn["tool"]})
        if k == i:
            break
        thinking = turn["thinking"]
        if "preamble" in turn:
            messages.append({"role": "assistant", "channel": "commentary", "content": turn["preamble"],
                             "reasoning_content": thinking})
            thinking = ""
        said = {"role": "assistant", "content": turn.get("answer"), "reasoning_content": thinking}
        if "call" in turn:
            said["tool_calls"] = [{"id": f"call_{k}", "type": "function", "function": turn["call"]}]
        messages.append(said)
    return {"messages": messages, "tools": c["tools"], "reasoning_effort": effort or c["effort"],
            "date": c["date"] or "none"}


def answered(name, i=None):
    """The text of the prompt after the answer to turn i (the last): without the reasoning."""
    turns = CONVERSATIONS[name]["turns"]
    turn = turns[-1 if i is None else i]
    parts = [("commentary", turn["preamble"])] if "preamble" in turn else []
    parts.append(("final", turn["answer"]))
    return turn["prompt"] + "<|start|>assistant".join(
        [f"<|channel|>{channel}<|message|>{text}<|end|>" for channel, text in parts] + [""])
