"""--gpus through the program: on emulated GPUs (build/emulated/infer) or, with --gpu, on those that are here. What needs no
GPU the twin does."""
import json
import re
import sys

import helpers
from helpers import DATE, FIXTURES, PARROT, PLAIN, Skip, copy_model, each, expect, has, infer, refused, same
from test_serve import CHAT, TINY, Server

NEEDS = ("gpus", "commands", "serve")  # rooms
EMULATED = "--emulated" in sys.argv
BUILDS = ["emulated"] if EMULATED else ["cuda"] * ("--gpu" in sys.argv)
PROGRAM = helpers.BUILD / "emulated" / "infer" if EMULATED else PLAIN.with_name("infer")
OFFLINE = {"HF_HUB_OFFLINE": 1}


def doctor():
    """What it says, without line breaks."""
    return " ".join(infer("doctor", program=PROGRAM, code=None, env=OFFLINE).text.split())


def several():
    """How many GPUs there are. Skips the test if these are not two."""
    if not BUILDS:
        raise Skip("needs --gpu and two GPUs, or --emulated")
    there = len(re.findall(r"✓ GPU +\d+: ", doctor()))
    if there < 2:
        raise Skip("needs two GPUs")
    return there


def test_answers():
    """Two GPUs give one GPU's answers, to the token, and these are right."""
    several()
    question = ("-p", "My name is Ada.", "--temperature", 0, "--date", DATE, "--ctx", 256, "--json")

    def answer(*gpus):
        facts = json.loads(infer("play", PARROT, *question, *gpus, program=PROGRAM).text)
        return {name: facts[name] for name in ("text", "thinking", "reason", "prompt_tokens", "tokens")}
    one = answer("--gpus", 1)
    same(answer(), one, "without --gpus")
    for gpus in "2", "1,0":
        same(answer("--gpus", gpus), one, f"--gpus {gpus}")
    said = infer("play", TINY, "2 + 3 =", "--temperature", 0, "-e", "low", "--ctx", 256, "--gpus", 2, program=PROGRAM)
    same(said.text, "2 + 3 = 5\n", "the answer of models/tiny")


def test_metrics():
    """The time of each GPU that has a part of the model, and of no other."""
    several()
    ask = {"messages": [{"role": "user", "content": "My name is Ada."}], "temperature": 0, "max_tokens": 12}
    answers = []
    for gpus in 1, 2:
        with Server(PARROT, "--ctx", 256, "--streams", 1, "--gpus", gpus, program=PROGRAM) as s:
            def busy():
                rows = re.findall(r'^infer_gpu_seconds_total{gpu="(\d+)"} (\S+)$', s.ask("GET", "/metrics"), re.M)
                same([gpu for gpu, _ in rows], [str(gpu) for gpu in range(gpus)], "GPUs with a row")
                return [float(seconds) for _, seconds in rows]
            answers.append(s.post(CHAT, ask)["choices"])
            once = busy()
            s.post(CHAT, ask)
            twice = busy()
            expect(all(0 < a < b for a, b in zip(once, twice)), f"--gpus {gpus}: {once} s, then {twice} s")
    same(answers[1], answers[0], "the answer of two GPUs")


def test_lists_are_refused():
    """Before a weight is loaded, with what is wrong."""
    there = several()

    def check(gpus, code, *words):
        refused("play", PARROT, "x", "--gpus", gpus, program=PROGRAM, code=code, words=words)
    cases = [(bad, 2, "--gpus must be a number of GPUs", bad) for bad in ("x", "1,1", "0,", ",1", "0,-1", "-1")]
    cases += [("0,99", 6, "no GPU 99"), ("99", 6, "no GPU 99")]
    if there > 2:
        cases.append(("3", 2, "3 GPUs cannot share this model", "--gpus can be 1, 2"))
    each(cases, check)


def test_doctor():
    """A line for each GPU, which says how many others it reaches, and one for NCCL."""
    there, said = several(), doctor()
    reached = [int(n) for n in re.findall(r"reaches the memory of (\d+) others", said)]
    same(len(reached), there, "GPUs that say what they reach")
    expect(all(n == there - 1 if EMULATED else n < there for n in reached), f"{there} GPUs: {reached}")
    expect(re.search(r"✓ NCCL +(\d+\.\d+\.\d+|none: GPUs without peer access need it)", said), said)


def test_inspect_says_how_many():
    """Wherever they divide the heads, and share or divide those of keys and values; experts of MXFP4 have to have a block
    of 32 values for each."""
    def check(name, model, gpus):
        same(json.loads(infer("inspect", model, "--json").text)["gpus"], gpus)
    expected = {"parrot": "1, 2", "odd": "1, 2", "true_heads": "1, 2"}
    if has("families"):
        expected.update({"llama3": "1, 2, 6", "qwen2": "1, 7", "gemma3": "1, 2, 4", "mixtral": "1, 2, 4",
                         "deepseek_v3": "1, 2", "deepseek_v2_lite": "1"})
    each([(name, FIXTURES / name, gpus) for name, gpus in expected.items()] + [("tiny", TINY, "1, 2, 4")], check)


def test_inspect_suggests_as_many_as_it_takes(folder):
    """Each GPU has its heads' part of the cache, and whole heads; it has the latents of DeepSeek whole."""
    several()

    def facts(model, context):
        made = copy_model(model, folder, {"max_position_embeddings": context})
        return json.loads(infer("inspect", made, "--json", program=PROGRAM).text)

    def check(name, model, gpus, part):
        """With this part of the cache a GPU has room for a context 10 % shorter than what fits, for none 10 % longer."""
        f = facts(model, 4096)
        fits = (f["gpu_bytes_free"] - f["work_bytes"]) / f["cache_bytes_per_token"] / part
        if 1.1 * fits > 1 << 24:
            raise Skip("needs --emulated: these GPUs have room for any cache of a small model")
        shorter, longer = facts(model, int(0.9 * fits)), facts(model, int(1.1 * fits))
        same((shorter["fits"], shorter.get("suggestion")), (False, f"--gpus {gpus}") if gpus > 1 else (True, None), "shorter")
        expect(longer["suggestion"].startswith("--ctx "), f"longer: {longer['suggestion']}")
    cases = [("two heads for two GPUs", PARROT, 2, 1 / 2), ("two heads for four", TINY, 2, 1 / 2)]
    if has("families"):
        cases.append(("latents", FIXTURES / "deepseek_v3", 1, 1))
    each(cases, check)
