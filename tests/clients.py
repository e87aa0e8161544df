"""What other people's clients see of a server, unmodified: litellm, and lm-eval's local-completions model, whose
loglikelihoods are compared with those of its own model on transformers. By hand: the packages are large, and change.
With the file TEXT, lm-eval alone asks which of two pieces continues a passage of it; MODEL then needs no chat format.

    python tests/clients.py [PROGRAM [MODEL [TEXT]]]     (./infer-reference models/tiny)
    needs: pip install litellm mcp "lm_eval[api]" transformers; for the comparison also torch accelerate peft
"""
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  OPENAI_API_KEY="secret")  # what both packages send

import litellm

litellm.suppress_debug_info = True
import lm_eval

from helpers import PLAIN, TESTS, expect, same
from test_serve import Server

ASK = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL = {"type": "function", "function": {"name": "get weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
MOST = 0.01  # difference of two loglikelihoods of an answer


def raises(kind, **how):
    try:
        litellm.completion(**how)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def check_litellm(url, name):
    how = {"model": f"openai/{name}", "api_base": url + "/v1", "temperature": 0, "messages": ASK, "max_tokens": 500,
           "num_retries": 0}
    whole = litellm.completion(**how)
    chunks = list(litellm.completion(**how, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    for answer in (whole, built):
        same(answer.choices[0].finish_reason, "stop", "finish_reason")
        same(answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage.total_tokens, "usage")
    for field in ("content", "reasoning_content"):
        expect(whole.choices[0].message[field], f"no {field}")
        same(built.choices[0].message[field], whole.choices[0].message[field], f"{field}, streamed")
    same(len(litellm.completion(**{**how, "n": 3, "temperature": 1}).choices), 3, "n")
    scored = litellm.completion(**how, logprobs=True, top_logprobs=2).choices[0]
    same("".join(t["token"] for t in scored.logprobs["content"]), whole.choices[0].message.content, "logprobs' tokens")
    forced = litellm.completion(**{**how, "max_tokens": 30}, tools=[TOOL], tool_choice="required").choices[0]
    same(forced.message.tool_calls[0].function.name, "get weather", "a forced call")
    text = litellm.text_completion(model=f"text-completion-openai/{name}", api_base=url + "/v1", prompt="1 + 1",
                                   max_tokens=5, temperature=0)
    same(text.usage.completion_tokens, 5, "tokens of a completion")
    raises(litellm.BadRequestError, **{**how, "n": 10**6})
    raises(litellm.NotFoundError, **{**how, "model": "openai/other"})
    raises(litellm.AuthenticationError, **how, api_key="wrong")
    print(f"litellm: {whole.choices[0].message.content!r}, ok")


def questions(text):
    """24 questions and their answers, or 64 passages of a text and the words that continue them."""
    if not text:
        lines = (TESTS.parent / "models" / "questions.jsonl").read_text().splitlines()[:24]
        return [(row["messages"][0]["content"] + "\n", row["answer"]) for row in map(json.loads, lines)]
    words = Path(text).read_text().split()
    expect(len(words) >= 64 * 60, "the text has fewer than 3,840 words")
    return [(" ".join(words[i:i + 40]), " ".join(words[i + 40:i + 60]))
            for i in range(0, len(words) - 59, len(words) // 64)][:64]


def evaluate(model, args, rows, folder):
    """Accuracy and loglikelihoods of a small task: which of two answers belongs to a question?"""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": question, "answers": [answer, rows[i - 1][1]]}) + "\n"
                            for i, (question, answer) in enumerate(rows)))
    task = {"task": "questions", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
            "doc_to_choice": "{{answers}}", "doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    found = lm_eval.simple_evaluate(model=model, model_args=args, tasks=[task], log_samples=True, bootstrap_iters=0)
    return found["results"]["questions"]["acc,none"], [
        (float(r[0][0]), str(r[0][1])) for s in sorted(found["samples"]["questions"], key=lambda s: s["doc_id"])
        for r in s["resps"]]


def check_lm_eval(url, name, model, rows, folder):
    # add_bos_token: lm-eval's own model lets the tokenizer add its BOS, local-completions does not unless told
    accuracy, ours = evaluate("local-completions", {
        "model": name, "base_url": url + "/v1/completions", "tokenizer_backend": "huggingface", "tokenizer": str(model),
        "num_concurrent": 4, "max_length": 1024, "add_bos_token": True}, rows, folder)
    print(f"lm-eval: accuracy {accuracy:.3f}, {len(ours)} loglikelihoods")
    try:
        from lm_eval.models.huggingface import HFLM
        from compare_logits import load
    except ImportError as e:
        return print(f"not compared with transformers: {e}")
    import torch
    import transformers
    theirs = HFLM(pretrained=load(str(model), "cpu", torch.float32),
                  tokenizer=transformers.AutoTokenizer.from_pretrained(model))
    expected, likely = evaluate(theirs, None, rows, folder)
    most = max(abs(a - b) for (a, _), (b, _) in zip(ours, likely))
    print(f"lm-eval on transformers: accuracy {expected:.3f}, largest difference of a loglikelihood {most:.2e}")
    same([greedy for _, greedy in ours], [greedy for _, greedy in likely], "greedy")
    expect(accuracy == expected and most <= MOST, "they differ")


def main():
    program = Path(sys.argv[1]) if len(sys.argv) > 1 else PLAIN
    model = Path(sys.argv[2]) if len(sys.argv) > 2 else TESTS.parent / "models" / "tiny"
    text = sys.argv[3] if len(sys.argv) > 3 else None
    limits = "--streams", 8
    with tempfile.TemporaryDirectory() as folder, Server(model, *limits, program=program.absolute(),
                                                         INFER_API_KEY="secret") as server:
        url, headers = f"http://127.0.0.1:{server.port}", {"Authorization": "Bearer secret"}
        name = server.ask("GET", "/v1/models", headers=headers)["data"][0]["id"]
        if not text:
            check_litellm(url, name)
        check_lm_eval(url, name, model, questions(text), Path(folder))


if __name__ == "__main__":
    main()
