"""What the `openai` package sees of a server: `python openai_client.py URL parrot|tiny|full`, by a Python that has it.
Fails with a traceback at the first thing that is not as the package's users expect."""
import json
import sys
from pathlib import Path

import openai

DATE = {"date": "2025-06-28"}
PARROT = Path(__file__).parent / "fixtures" / "parrot" / "conversations.json"


def joined(stream):
    """The choices of a stream, each put together again, the usage, and how many chunks there were."""
    choices, usage, chunks = {}, None, 0
    for chunk in stream:
        chunks, usage = chunks + 1, chunk.usage or usage
        for c in chunk.choices:
            made = choices.setdefault(c.index, {"content": "", "reasoning": "", "calls": [], "finish": None,
                                                "scores": []})
            made["content"] += c.delta.content or ""
            made["reasoning"] += getattr(c.delta, "reasoning_content", None) or ""
            made["finish"] = c.finish_reason or made["finish"]
            made["scores"] += c.logprobs.content if c.logprobs else []
            for call in c.delta.tool_calls or []:
                if call.index == len(made["calls"]):
                    made["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                made["calls"][call.index]["arguments"] += call.function.arguments or ""
    return choices, usage, chunks


def raises(kind, call, *words):
    try:
        call()
    except kind as e:
        assert all(word in str(e) for word in words), f"{e} lacks {words}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def parrot(client):
    """Harmony with tools: a model of known answers."""
    conversations = {c["name"]: c for c in json.loads(PARROT.read_text())}
    model = client.models.list().data[0].id
    c = conversations["weather"]
    first, second = c["turns"][0], c["turns"][1]
    messages = [{"role": "system", "content": c["system"]}] if c["system"] else []
    messages.append({"role": "user", "content": first["user"]})
    how = {"model": model, "temperature": 0, "tools": c["tools"], "extra_body": {"date": c["date"] or "none"}}
    answer = client.chat.completions.create(messages=messages, **how)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call, = choice.message.tool_calls
    assert call.type == "function" and call.id and call.function.name == first["call"]["name"], call
    assert json.loads(call.function.arguments) == json.loads(first["call"]["arguments"]), call
    assert choice.message.reasoning_content == first["thinking"], choice.message
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    choices, usage, _ = joined(client.chat.completions.create(messages=messages, stream=True,
                                                              stream_options={"include_usage": True}, **how))
    assert choices[0]["calls"][0]["name"] == call.function.name, choices
    assert choices[0]["calls"][0]["arguments"] == call.function.arguments, choices
    assert choices[0]["finish"] == "tool_calls" and choices[0]["reasoning"] == first["thinking"], choices
    assert usage.completion_tokens == answer.usage.completion_tokens, usage
    # the round trip: the package's own message goes back, with the tool's result
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": second["tool"]}]
    said = client.chat.completions.create(messages=messages, **how).choices[0]
    assert said.finish_reason == "stop" and said.message.content == second["answer"], said
    # no tools: its name is not heard of
    none = client.chat.completions.create(messages=messages[:-2], tool_choice="none", **how)
    assert not none.choices[0].message.tool_calls, none
    name = c["tools"][0]["function"]["name"]
    for choice in ({"type": "function", "function": {"name": name}}, "required"):
        forced = client.chat.completions.create(messages=[{"role": "user", "content": "Hello!"}], tool_choice=choice,
                                                max_tokens=40, **how).choices[0]
        assert forced.message.tool_calls[0].function.name == name, forced
    # a name with spaces is mapped, and mapped back
    tools = json.loads(json.dumps(c["tools"]).replace(f'"{name}"', '"my <odd> [name]"'))
    odd = client.chat.completions.create(messages=messages[:1], max_tokens=20, **{**how, "tools": tools},
                                         tool_choice={"type": "function", "function": {"name": "my <odd> [name]"}})
    assert odd.choices[0].message.tool_calls[0].function.name == "my <odd> [name]", odd
    raises(openai.BadRequestError, lambda: client.chat.completions.create(
        messages=messages[:1], **how, tool_choice={"type": "function", "function": {"name": "other"}}), "tool_choice")
    p = conversations["preamble"]
    said = client.chat.completions.create(messages=[{"role": "user", "content": p["turns"][0]["user"]}], model=model,
                                          temperature=0, extra_body={"date": p["date"] or "none"}).choices[0].message
    assert said.content == p["turns"][0]["preamble"] + "\n\n" + p["turns"][0]["answer"], said


def tiny(client):
    """A model that is right about small things: what it says, in all the ways to ask for it."""
    model = client.models.list().data[0].id
    how = {"model": model, "temperature": 0, "extra_body": DATE}
    ask = [{"role": "user", "content": "What is 12 + 30?"}]
    answer = client.chat.completions.create(messages=ask, **how)
    assert answer.choices[0].message.content == "12 + 30 = 42" and answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    choices, usage, chunks = joined(client.chat.completions.create(messages=ask, stream=True, **how))
    assert choices[0]["content"] == "12 + 30 = 42" and chunks > 20 and usage is None, choices
    # the second turn computes only what is new
    more = ask + [{"role": "assistant", "content": "12 + 30 = 42"}, {"role": "user", "content": "Add 8 to that."}]
    again = client.chat.completions.create(messages=more, **how)
    assert again.choices[0].message.content == "42 + 8 = 50", again
    assert again.usage.prompt_tokens_details.cached_tokens >= 64, again.usage
    # n, seeds
    warm = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 3, "seed": 7}
    one, two = (client.chat.completions.create(n=3, max_tokens=60, **warm) for _ in range(2))
    texts = [(c.message.content, c.message.reasoning_content if hasattr(c.message, "reasoning_content") else "")
             for c in one.choices]
    assert [c.index for c in one.choices] == [0, 1, 2] and len(set(texts)) > 1, texts
    assert [c.message for c in one.choices] == [c.message for c in two.choices]
    choices, _, _ = joined(client.chat.completions.create(n=3, max_tokens=60, stream=True, **warm))
    assert [choices[i]["content"] for i in range(3)] == [content or "" for content, _ in texts], choices
    # stop: across token borders, streamed too; nothing of it is shown
    for stop, content in (([" = 4"], "12 + 30"), ("30", "12 + "), (["nowhere", "2 + 3"], "1")):
        said = client.chat.completions.create(messages=ask, stop=stop, **how).choices[0]
        assert (said.message.content, said.finish_reason) == (content, "stop"), (stop, said)
        choices, _, _ = joined(client.chat.completions.create(messages=ask, stop=stop, stream=True, **how))
        assert (choices[0]["content"], choices[0]["finish"]) == (content, "stop"), (stop, choices)
    # limits
    for name in ("max_tokens", "max_completion_tokens"):
        cut = client.chat.completions.create(messages=ask, **{name: 3}, **how)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3, cut
    # logprobs
    scored = client.chat.completions.create(messages=ask, logprobs=True, top_logprobs=3, **how).choices[0]
    content = scored.logprobs.content
    assert "".join(t.token for t in content) == "12 + 30 = 42", content
    assert all(t.top_logprobs[0].token == t.token and t.top_logprobs[0].logprob == t.logprob <= 0
               and len(t.top_logprobs) == 3 and bytes(t.bytes).decode() == t.token for t in content), content
    choices, _, _ = joined(client.chat.completions.create(messages=ask, logprobs=True, top_logprobs=3, stream=True,
                                                          **how))
    assert choices[0]["scores"] == content, choices
    # a bias so strong that it decides
    five = client.post("/../tokenize", body={"prompt": "5"}, cast_to=object)["tokens"][0]
    biased = client.completions.create(model=model, prompt="1 + 1 = ", max_tokens=4, logit_bias={str(five): 100})
    assert biased.choices[0].text == "5555", biased
    # completions: text, several prompts, echo with the prompt's logprobs
    both = client.completions.create(model=model, prompt=["1 + 1", "2 + 2"], max_tokens=5, temperature=0, echo=True)
    assert [c.text[:5] for c in both.choices] == ["1 + 1", "2 + 2"], both
    echo = client.completions.create(model=model, prompt="1 + 1 = 2", max_tokens=0, echo=True, logprobs=2)
    scores = echo.choices[0].logprobs
    assert "".join(scores.tokens) == "1 + 1 = 2" == echo.choices[0].text, echo
    assert scores.token_logprobs[0] is None and all(p <= 0 for p in scores.token_logprobs[1:]), scores
    assert scores.text_offset[0] == 0 and len(scores.top_logprobs) == len(scores.tokens), scores
    assert echo.usage.completion_tokens == 0, echo.usage
    best = client.completions.create(model=model, prompt="1 + 1", max_tokens=5, temperature=0, logprobs=2).choices[0]
    assert [max(top, key=top.get) for top in best.logprobs.top_logprobs] == best.logprobs.tokens, best
    text = "".join(c.choices[0].text for c in client.completions.create(model=model, prompt="1 + 1", max_tokens=5,
                                                                        temperature=0, echo=True, stream=True))
    assert text == both.choices[0].text, text
    # errors as the package's classes
    create = client.chat.completions.create
    raises(openai.NotFoundError, lambda: create(messages=ask, model="other"), "other")
    assert client.models.retrieve(model).id == model
    raises(openai.NotFoundError, lambda: client.models.retrieve("other"), "no model other")
    raises(openai.BadRequestError, lambda: create(messages=ask, **{**how, "temperature": -1}), "temperature")
    raises(openai.BadRequestError, lambda: create(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:,"}}]}], **how), "messages[0].content")
    raises(openai.BadRequestError, lambda: create(messages=ask, response_format={"type": "xml"}, **how),
           "response_format")
    raises(openai.BadRequestError, lambda: create(messages=ask, modalities=["text", "audio"], **how), "modalities")
    raises(openai.BadRequestError, lambda: create(messages=[{"role": "user", "content": "x " * 9000}], **how),
           "context")
    raises(openai.BadRequestError, lambda: create(messages=ask, reasoning_effort="absurd", **how), "reasoning_effort")


def full(client):
    """A server of one answer at a time, for which no other may wait."""
    how = {"model": client.models.list().data[0].id, "prompt": "x"}
    stream = client.completions.create(**how, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    raises(openai.RateLimitError, lambda: client.completions.create(**how), "try again")
    stream.close()
    client.with_options(max_retries=10).completions.create(**how)  # it tries again, and then there is room


if __name__ == "__main__":
    url, which = sys.argv[1:]
    {"parrot": parrot, "tiny": tiny, "full": full}[which](openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0))
