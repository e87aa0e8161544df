"""models/tiny through the whole program: questions that it never saw in training, asked in a terminal, have one right
answer; so have a conversation of four turns, the date and the calculator."""
import json
import re

from helpers import PLAIN, TESTS, Terminal, expect, has, infer, same

MODELS = TESTS.parent / "models"
TINY = MODELS / "tiny"
EVERY = 25  # of the questions are asked here
STOPS = ("<|return|>", "<|call|>")


def tiny(*options):
    """A terminal with the model, greedy, at its first prompt."""
    t = Terminal("play", TINY, "--temperature", "0", *options, program=PLAIN, columns=500)
    t.ready()
    return t


def questions():
    return [json.loads(line) for line in (MODELS / "questions.jsonl").read_text().splitlines()]


def load(t, folder, c):
    (folder / "chat.json").write_text(json.dumps(c))
    t.say(f"/load {folder}/chat.json", "Loaded")


def ask(t, question):
    """Asks; returns what was said, without the reasoning, or a call."""
    shown = t.say(question, " tokens/s")
    said = [part for part in re.findall(r"(?:^|\n)(?:Assistant|tool call): (.*)", shown)]
    return said[-1].strip() if said else shown


def test_questions_that_were_held_out(folder):
    """In one process, each after the conversation that led to it; 99 % are right, of these at most one may be wrong."""
    wrong, asked = [], questions()[::EVERY]

    def right(q, said):
        if not said.endswith(q["answer"]):
            wrong.append(f"{q['messages'][-1]['content']}: {said!r}, expected {q['answer']!r}")
    if not has("terminal"):  # no conversation can be loaded: what the first question is, one process each
        asked = [q for q in questions() if [m["role"] for m in q["messages"]] == ["user"] and not q.get("tools")][::20]
        for q in asked:
            options = ["-p", q["messages"][0]["content"], "-e", q["reasoning_effort"], "--date", q.get("date") or "none"]
            right(q, infer("play", TINY, "--temperature", 0, *options, program=PLAIN).text.strip())
    else:
        with tiny() as t:
            for q in asked:
                if q["messages"][-1]["role"] == "user":
                    load(t, folder, {**q, "messages": q["messages"][:-1]})
                    right(q, ask(t, q["messages"][-1]["content"]))
    expect(len(wrong) <= 1, f"{len(wrong)} of {len(asked)} are wrong:\n" + "\n".join(wrong))


def test_a_conversation_of_four_turns():
    """Each turn needs what an earlier one said."""
    with tiny("--date", "2025-06-28") as t:
        for question, answer in (("My name is Ada.", "Nice to meet you, Ada."),
                                 ("What is 1234 + 5678?", "1234 + 5678 = 6912"),
                                 ("Add 88 to that.", "6912 + 88 = 7000"),
                                 ("What is my name?", "Your name is Ada.")):
            same(ask(t, question), answer, question)


def test_the_date():
    for date, answers in (("2025-06-28", ("Today is 2025-06-28.", "Today is Saturday.", "In 5 days it is 2025-07-03.")),
                          ("none", ("I am sorry, nobody told me the date.",) * 3)):
        with tiny("--date", date) as t:
            for question, answer in zip(("What is the date today?", "What day of the week is it today?",
                                         "What date is it in 5 days?"), answers):
                same(ask(t, question), answer, f"{question} ({date})")


def test_the_calculator(folder):
    """It calls the tool that is offered, and reads what the tool says."""
    c = next(q for q in questions() if q["kind"] == "call")
    c = {"messages": [], "tools": c["tools"], "date": "2025-06-28", "reasoning_effort": "medium"}
    question, arguments = "What is 123 * 456?", '{"expression":"123*456"}'
    if has("terminal"):
        with tiny() as t:
            load(t, folder, c)
            same(ask(t, question), "functions.calculator " + arguments, "call")
    else:
        called = complete({**c, "messages": [{"role": "user", "content": question}]})
        expect(" to=functions.calculator" in called and called.endswith(arguments + "<|call|>"), f"no call: {called}")
    call = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    c["messages"] = [{"role": "user", "content": question},
                     {"role": "assistant", "content": None, "tool_calls": [call],
                      "reasoning_content": "I use the calculator."},
                     {"role": "tool", "tool_call_id": "call_0", "content": "56088"}]
    same(complete(c), "<|channel|>final<|message|>123 * 456 = 56088<|return|>", "with the tool's result")


def complete(c, most=60):
    """What the model writes after any conversation, token by token: `play` ends at a user's question."""
    def filtered(command, text, *options):
        return infer(command, TINY, *options, stdin=text, program=PLAIN).text
    stops = json.loads(filtered("tokenize", "".join(STOPS), "--special"))
    ids, written = json.loads(filtered("render", json.dumps(c), "--ids")), []
    while len(written) < most and not (written and written[-1] in stops):
        asked = ",".join(map(str, ids + written))
        written.append(int(infer("logits", TINY, "--ids", asked, "--top", 1, program=PLAIN).text.split()[0]))
    return filtered("detokenize", json.dumps(written))
