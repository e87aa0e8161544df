"""What other people's clients see of a server, unmodified: `python clients.py CLIENT URL MODEL`, by a Python that has it.
MODEL is the folder of models/tiny. Fails with a traceback at the first thing that is not as the client's users expect.

lm-eval compares loglikelihoods with those of its own model on transformers, where torch and transformers are there, too;
with the file TEXT as a fourth argument it asks which of two pieces continues a passage of it, of any model.
"""
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  OPENAI_API_KEY="secret", OPENAI_AGENTS_DISABLE_TRACING="1", LANGCHAIN_TRACING_V2="false", DO_NOT_TRACK="1")

QUESTION, ANSWER = "What is 12 + 30?", "12 + 30 = 42"
ASK = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "get weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
DATE = {"date": "2025-06-28"}


def expect(found, expected=ANSWER):
    assert found == expected, f"{found!r}, expected {expected!r}"


def raises(kind, call, *args, **how):
    try:
        call(*args, **how)
    except kind as e:
        return str(e)
    raise AssertionError(f"no {kind.__name__}")


def litellm(url, model):
    import litellm
    litellm.suppress_debug_info = True
    how = {"model": f"openai/{model.name}", "api_base": url, "temperature": 0, "messages": ASK, "max_tokens": 500,
           "num_retries": 0}
    whole = litellm.completion(**how)
    chunks = list(litellm.completion(**how, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    for answer in (whole, built):
        expect(answer.choices[0].finish_reason, "stop")
        expect(answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage.total_tokens)
        expect(answer.choices[0].message.content)
        assert answer.choices[0].message.reasoning_content
    expect(len(litellm.completion(**{**how, "n": 3, "temperature": 1}).choices), 3)
    scored = litellm.completion(**how, logprobs=True, top_logprobs=2).choices[0]
    expect("".join(t["token"] for t in scored.logprobs["content"]))
    forced = litellm.completion(**{**how, "max_tokens": 30}, tools=[TOOL], tool_choice="required").choices[0]
    expect(forced.message.tool_calls[0].function.name, "get weather")
    text = litellm.text_completion(model=f"text-completion-openai/{model.name}", api_base=url, prompt="1 + 1",
                                   max_tokens=5, temperature=0)
    expect(text.usage.completion_tokens, 5)
    raises(litellm.BadRequestError, litellm.completion, **{**how, "n": 10**6})
    raises(litellm.ContextWindowExceededError, litellm.completion,
           **{**how, "messages": [{"role": "user", "content": "x " * 9000}]})
    raises(litellm.NotFoundError, litellm.completion, **{**how, "model": "openai/other"})
    raises(litellm.AuthenticationError, litellm.completion, **how, api_key="wrong")


def langchain(url, model):
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_openai import ChatOpenAI
    chat = ChatOpenAI(base_url=url, model=model.name, temperature=0, max_retries=0, stream_usage=True)
    answer = chat.invoke(QUESTION)
    expect(answer.content)
    assert answer.usage_metadata["total_tokens"] and answer.response_metadata["finish_reason"] == "stop"
    parts = list(chat.stream(QUESTION))
    expect("".join(part.content for part in parts))
    assert len(parts) > 10
    more = chat.invoke([HumanMessage(QUESTION), AIMessage(answer.content), HumanMessage("Add 8 to that.")])
    expect(more.content, "42 + 8 = 50")
    expect([a.content for a in chat.batch([QUESTION] * 3)], [ANSWER] * 3)
    forced = chat.bind_tools([{**TOOL["function"], "name": "get_weather"}], tool_choice="required").bind(max_tokens=30)
    part = [c["name"] for p in forced.stream(QUESTION) for c in p.tool_call_chunks if c["name"]]
    expect(part, ["get_weather"])
    raises(Exception, chat.bind(n=10**6).invoke, QUESTION)


def llama_index(url, model):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike
    llm = OpenAILike(model=model.name, api_base=url, api_key="secret", is_chat_model=True, temperature=0, max_retries=0,
                     context_window=2048)
    talk = [ChatMessage(role="user", content=QUESTION)]
    expect(llm.chat(talk).message.content)
    expect("".join(part.delta or "" for part in llm.stream_chat(talk)))
    expect(llm.complete(QUESTION).text)
    text = OpenAILike(model=model.name, api_base=url, api_key="secret", is_chat_model=False, max_tokens=5, max_retries=0)
    assert text.complete("1 + 1").text


def instructor(url, model):
    """Its modes that send no schema: the server sees an ordinary request. What they make of the answer is their part."""
    import instructor
    import openai
    client = instructor.from_openai(openai.OpenAI(base_url=url, max_retries=0), mode=instructor.Mode.MD_JSON)
    answer = client.chat.completions.create(model=model.name, messages=ASK, response_model=None, temperature=0)
    expect(answer.choices[0].message.content)


def pydantic_ai(url, model):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    chat = OpenAIChatModel(model.name, provider=OpenAIProvider(base_url=url, api_key="secret"))
    agent = Agent(chat, model_settings={"temperature": 0})
    first = agent.run_sync(QUESTION)
    expect(first.output)
    expect(agent.run_sync("Add 8 to that.", message_history=first.new_messages()).output, "42 + 8 = 50")

    async def streamed():
        async with agent.run_stream(QUESTION) as result:
            return [part async for part in result.stream_text(delta=True)]
    expect("".join(asyncio.run(streamed())))


def openai_agents(url, model):
    import openai
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner
    client = openai.AsyncOpenAI(base_url=url, max_retries=0)
    agent = Agent(name="a", model=OpenAIChatCompletionsModel(model=model.name, openai_client=client),
                  model_settings=ModelSettings(temperature=0))

    async def run():
        expect((await Runner.run(agent, QUESTION)).final_output)
        streamed = Runner.run_streamed(agent, QUESTION)
        events = [event async for event in streamed.stream_events()]
        expect(streamed.final_output)
        assert len(events) > 10
    asyncio.run(run())


def smolagents(url, model):
    from smolagents import OpenAIModel
    chat = OpenAIModel(model_id=model.name, api_base=url, api_key="secret", temperature=0)
    ask = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    answer = chat.generate(ask, stop_sequences=["nowhere"])
    expect(answer.content)
    assert answer.token_usage.output_tokens
    expect("".join(part.content or "" for part in chat.generate_stream(ask)))


def dspy(url, model):
    import dspy
    lm = dspy.LM(f"openai/{model.name}", api_base=url, api_key="secret", temperature=0, max_tokens=500, num_retries=0, cache=False)
    found = lm(messages=ASK)[0]
    expect(found["text"] if isinstance(found, dict) else found)


def aider(url, model):
    with tempfile.TemporaryDirectory() as folder:
        p = subprocess.run([Path(sys.executable).with_name("aider"), "--model", f"openai/{model.name}", "--openai-api-base", url,
                            "--openai-api-key", "secret", "--message", "/ask " + QUESTION, "--no-git", "--yes-always",
                            "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-pretty", "--map-tokens", "0"],
                           cwd=folder, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
                           env={**os.environ, "HOME": folder})
    assert ANSWER in p.stdout and "Tokens:" in p.stdout and not p.returncode, p.stdout[-1500:] + p.stderr[-500:]


# ---- lm-eval

def questions(text):
    """24 questions and their answers, or 64 passages of a text and the words that continue them."""
    if not text:
        lines = (Path(__file__).parent.parent / "models" / "questions.jsonl").read_text().splitlines()
        ask = "<|start|>user<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"
        rows = [row for row in map(json.loads, lines) if row["kind"] == "add" and len(row["messages"]) == 1][:24]
        rows.sort(key=lambda row: len(row["answer"]))  # of neighbours neither is likelier because it is shorter
        return [(ask.format(row["messages"][0]["content"]), row["answer"]) for row in rows]
    words = Path(text).read_text().split()
    assert len(words) >= 64 * 60, "the text has fewer than 3,840 words"
    return [(" ".join(words[i:i + 40]), " ".join(words[i + 40:i + 60]))
            for i in range(0, len(words) - 59, len(words) // 64)][:64]


def evaluate(model, args, rows, folder):
    """Accuracy and loglikelihoods of a small task: which of two answers belongs to a question?"""
    import lm_eval
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


def lm_eval(url, model, text=None):
    # add_bos_token: lm-eval's own model lets the tokenizer add its BOS, local-completions does not unless told
    with tempfile.TemporaryDirectory() as folder:
        rows = questions(text)
        accuracy, ours = evaluate("local-completions", {
            "model": model.name, "base_url": url + "/completions", "tokenizer_backend": "huggingface", "tokenizer": str(model),
            "num_concurrent": 4, "max_length": 1024, "add_bos_token": True}, rows, Path(folder))
        print(f"lm-eval: accuracy {accuracy:.3f}, {len(ours)} loglikelihoods")
        assert accuracy > 0.9 or text, accuracy
        try:
            from compare_logits import load
            from lm_eval.models.huggingface import HFLM
        except ImportError as e:
            return print(f"not compared with transformers: {e}")
        import torch
        import transformers
        theirs = HFLM(pretrained=load(str(model), "cpu", torch.float32),
                      tokenizer=transformers.AutoTokenizer.from_pretrained(model))
        expected, likely = evaluate(theirs, None, rows, Path(folder))
    most = max(abs(a - b) for (a, _), (b, _) in zip(ours, likely))
    print(f"lm-eval on transformers: accuracy {expected:.3f}, largest difference of a loglikelihood {most:.2e}")
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in likely]
    assert accuracy == expected and most <= 0.01


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2] + "/v1", Path(sys.argv[3]), *sys.argv[4:])
