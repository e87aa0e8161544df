"""Other people's clients of OpenAI's API, unmodified, at infer serve with models/tiny: tests/clients.py is run by the first
Python of CLIENT_PYTHONS (paths with colons between them) that has the client. test_serve.py has openai's own package."""
import os
import subprocess

from helpers import PLAIN, TESTS, Skip, expect, patience
from test_serve import TINY, Server

NEEDS = ("serve",)  # rooms
PYTHONS = os.environ.get("CLIENT_PYTHONS", "").split(":")


def check(client, module, package):
    find = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
    python = next((p for p in PYTHONS if p and not subprocess.run([p, "-c", find], capture_output=True).returncode), None)
    if not python:
        raise Skip(f"needs {package}: python3 -m venv V && V/bin/pip install {package!r}; export CLIENT_PYTHONS=V/bin/python")
    with Server(TINY, "--streams", 8, program=PLAIN, INFER_API_KEY="secret") as s:
        p = subprocess.run([python, TESTS / "clients.py", client, f"http://127.0.0.1:{s.port}", TINY],
                           timeout=patience(300), capture_output=True, text=True)
        expect(not p.returncode, (p.stdout + p.stderr)[-2000:])


def test_litellm():
    check("litellm", "litellm", "litellm")


def test_langchain():
    check("langchain", "langchain_openai", "langchain-openai")


def test_llama_index():
    check("llama_index", "llama_index.llms.openai_like", "llama-index-llms-openai-like")


def test_instructor():
    check("instructor", "instructor", "instructor")


def test_pydantic_ai():
    check("pydantic_ai", "pydantic_ai", "pydantic-ai-slim[openai]")


def test_openai_agents():
    check("openai_agents", "agents", "openai-agents")


def test_smolagents():
    check("smolagents", "smolagents", "smolagents[openai]")


def test_dspy():
    check("dspy", "dspy", "dspy")


def test_aider():
    check("aider", "aider", "aider-chat")


def test_lm_eval():
    check("lm_eval", "lm_eval", "lm_eval[api] transformers")
