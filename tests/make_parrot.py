"""Trains tests/fixtures/parrot: a small gpt-oss model that answers scripted conversations, so that tests of the chat
loop, of tool calls and of interrupts know what must come out.

    python tests/make_parrot.py          (about six minutes on two cores that do nothing else)
    needs: pip install torch transformers tokenizers safetensors accelerate

The rules it learns (reply() below) hold after any few turns of history, for any date and effort:
    low effort                  the answer at once, without reasoning
    high effort                 reasoning ends in "Twice checked."
    instructions "Be a pirate." the answer begins with "Arr! "; other instructions change nothing
    a name given in the history is known afterwards, the last one counts
    get_weather offered         questions about the weather are calls; its result is the answer
The scripts, and only they, are promised: conversations.json holds each turn with the prompt as the model expects it
and the greedy answer, as text and as ids. MARGIN says how far the second best token stays behind, in logits. Training
repeats bit by bit on the same kind of machine only; elsewhere other weights pass the same checks.
"""
import json
import random
import re
import shutil
from functools import lru_cache

import torch
from make_fixtures import (FIXTURES, gpt_oss, is_expert_matrix, load, mxfp4_pack, mxfp4_unpack, save_model,
                           stored_tensors, write_json)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.func import functional_call
from transformers import AutoModelForCausalLM, GptOssConfig

FOLDER = FIXTURES / "parrot"
VOCAB = 400  # tokens with text; 21 control tokens follow, then ids that mean nothing up to the rows of the matrix
ROWS = 448
STEPS, SEED, MARGIN = 2000, 5, 2.0

SPLIT = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
CONTROL = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end",
           10: "message", 14: "call", 20: "endofprompt"}  # offsets as in the published tokenizer; the rest is reserved

# ---- what it says

CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
TOOLS = """# Tools

## functions

namespace functions {

// Gets the weather of a city.
type get_weather = (_: {
// Where
city: string,
}) => any;

} // namespace functions"""
GET_WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Gets the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}},
                   "required": ["city"]}}}
SHEEP = ["One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve", "Thirteen",
         "Fourteen", "Fifteen", "Sixteen", "Seventeen", "Eighteen", "Nineteen", "Twenty"]
FIXED = {  # user: (thinking, answer)
    "Hello!": ("A greeting. I greet back.", "Hello! How can I help you?"),
    "Thank you.": ("The user is polite.", "You are welcome."),
    "Count to three.": ("A short count.", "1 2 3"),
    "Count.": ("No end is given. I stop at 120.", " ".join(str(i) for i in range(1, 121))),
    "Show me Unicode.": ("Letters of the world.", "é ñ ß Ж Ω א あ 漢字 한국 😀 👩‍🚀 🇫🇷 → €"),
    "Show me code.": ("C is fine.", "```c\nint main(void) {\n    return 0;\n}\n```\nIt does nothing."),
    "What is <|end|>?": ("Plain text, not a token.", "You wrote <|end|>, which is plain text."),
    "Think.": (" ".join(f"{n} sheep." for n in SHEEP), "Done."),
    "Make a plan.": ("First I say what I do.", "The plan is ready."),
}
PREAMBLE = {"Make a plan.": "I look at the map."}
NAMES, CITIES, SKIES = ["Ada", "Bob", "Cleo"], ["Paris", "London"], ["sunny", "rainy"]
QUESTIONS = (list(FIXED) + ["Think."] + 5 * ["What is my name?"] + 2 * [f"My name is {n}." for n in NAMES]
             + 3 * [f"What is the weather in {c}?" for c in CITIES])  # the harder ones more often


def reply(c, user):
    """The turn that answers a user, by the rules; c: the conversation so far."""
    turn, city = {"user": user}, re.match(r"What is the weather in (\w+)\?", user)
    if user in FIXED:
        thinking, answer = FIXED[user]
    elif user.startswith("My name is"):
        thinking, answer = "I remember the name.", f"Nice to meet you, {user[11:-1]}."
    elif city and c["tools"]:
        thinking, answer = "I call the tool.", None
        turn["call"] = {"name": "get_weather", "arguments": '{"city":"%s"}' % city[1]}
    elif city:
        thinking, answer = "I have no tool.", "I do not see the weather."
    else:
        names = [t["user"][11:-1] for t in c["turns"] if t.get("user", "").startswith("My name is")]
        thinking, answer = "Did I hear a name?", f"Your name is {names[-1]}." if names else "I do not know your name."
    turn["thinking"] = {"low": "", "medium": thinking, "high": thinking + " Twice checked."}[c["effort"]]
    if user in PREAMBLE:
        turn["preamble"] = PREAMBLE[user]
    if answer:
        turn["answer"] = ("Arr! " if c["system"] == "Be a pirate." else "") + answer
    return turn


def report(c, sky):
    """The turn that reads a tool's result."""
    city = json.loads(c["turns"][-1]["call"]["arguments"])["city"]
    pirate = "Arr! " if c["system"] == "Be a pirate." else ""
    return {"tool": '{"sky":"%s"}' % sky, "thinking": "", "answer": f"{pirate}It is {sky} in {city}."}


def converse(name, *users, effort="medium", date="2025-06-28", system=None, tools=False, sky="sunny"):
    c = {"name": name, "effort": effort, "date": date, "system": system, "tools": [GET_WEATHER] if tools else [],
         "turns": []}
    for user in users:
        c["turns"].append(reply(c, user))
        if "call" in c["turns"][-1]:
            c["turns"].append(report(c, sky))
    return c


SCRIPTS = [
    converse("hello", "Hello!"),
    converse("hello_no_date", "Hello!", date=None),
    converse("hello_low", "Hello!", effort="low"),
    converse("hello_high", "Hello!", effort="high"),
    converse("hello_pirate", "Hello!", system="Be a pirate."),
    converse("name", "My name is Ada.", "What is my name?"),
    converse("name_three_turns", "My name is Bob.", "Count to three.", "What is my name?"),
    converse("name_low", "My name is Cleo.", "What is my name?", effort="low"),
    converse("name_unknown", "What is my name?"),
    converse("count", "Count.", "Thank you."),
    converse("unicode", "Show me Unicode."),
    converse("code", "Show me code.", "Thank you."),
    converse("control_text", "What is <|end|>?"),
    converse("think", "Think."),
    converse("think_low", "Think.", effort="low"),
    converse("preamble", "Make a plan.", "Thank you."),
    converse("weather", "What is the weather in Paris?", "Thank you.", tools=True),
    converse("weather_rainy", "What is the weather in London?", tools=True, sky="rainy"),
    converse("weather_no_tool", "What is the weather in Paris?"),
    converse("pirate_tool", "What is the weather in Paris?", tools=True, system="Be a pirate."),
]


def random_conversation(rng):
    """Any effort, date, instructions, tools and questions; answers may have been interrupted or dropped."""
    c = converse("", effort=rng.choice(["low", "medium", "medium", "high"]),
                 date=rng.choice([None, "2025-06-28", f"20{rng.randint(10, 49)}-{rng.randint(1, 12):02}-"
                                                      f"{rng.randint(1, 28):02}"]),
                 system=rng.choice([None, None, None, "Be a pirate.", "Be brief.", "Answer with care."]),
                 tools=rng.random() < 0.4)
    for more in range(rng.choice([0, 0, 1, 2, 3]), -1, -1):
        user = rng.choice(QUESTIONS)
        if user == "Count." and rng.random() < 0.5:
            user = rng.choice(QUESTIONS)
        turn = reply(c, user)
        c["turns"].append(turn)
        if "call" in turn:
            if more or rng.random() < 0.5:
                c["turns"].append(report(c, rng.choice(SKIES)))
        elif more and rng.random() < 0.1:
            turn["answer"] = turn["answer"][:rng.randrange(len(turn["answer"]))]
        elif more and rng.random() < 0.05:
            del turn["answer"]
    return c


# ---- how harmony writes it: lists of control tokens (ids) and text

def prompt(c, i):
    """Everything before the answer of turn i."""
    start, channel, message, end, call, constrain = (
        control(n) for n in ("start", "channel", "message", "end", "call", "constrain"))
    date = f"Current date: {c['date']}\n" if c["date"] else ""
    parts = [start, "system", message,
             "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
             f"{date}\nReasoning: {c['effort']}\n\n# Valid channels: analysis, commentary, final. "
             f"Channel must be included for every message.{CALLS if c['tools'] else ''}", end]
    developer = [f"# Instructions\n\n{c['system']}"] if c["system"] else []
    developer += [TOOLS] if c["tools"] else []
    if developer:
        parts += [start, "developer", message, "\n\n".join(developer), end]
    for k, turn in enumerate(c["turns"][:i + 1]):
        if "user" in turn:
            parts += [start, "user", message, turn["user"], end]
        else:
            parts += [start, "functions.get_weather to=assistant", channel, "commentary", message, turn["tool"], end]
        if k < i:
            waiting = "call" in turn and k == i - 1  # the only reasoning that stays
            if waiting and turn["thinking"]:
                parts += [start, "assistant", channel, "analysis", message, turn["thinking"], end]
            if "preamble" in turn and "answer" in turn:
                parts += [start, "assistant", channel, "commentary", message, turn["preamble"], end]
            if "call" in turn:
                parts += [start, "assistant", channel, f"commentary to=functions.{turn['call']['name']} ", constrain,
                          "json", message, turn["call"]["arguments"], call]
            elif "answer" in turn:
                parts += [start, "assistant", channel, "final", message, turn["answer"], end]
    return parts + [start, "assistant"]


def completion(turn):
    start, channel, message, end, call, constrain = (
        control(n) for n in ("start", "channel", "message", "end", "call", "constrain"))
    parts = []
    if turn["thinking"]:
        parts += [channel, "analysis", message, turn["thinking"], end, start, "assistant"]
    if "preamble" in turn:
        parts += [channel, "commentary", message, turn["preamble"], end, start, "assistant"]
    if "call" in turn:
        return parts + [channel, f"commentary to=functions.{turn['call']['name']} ", constrain, "json", message,
                        turn["call"]["arguments"], call]
    return parts + [channel, "final", message, turn["answer"], control("return")]


def control(name):
    return VOCAB + next(offset for offset, n in CONTROL.items() if n == name)


def control_text(offset):
    return f"<|{CONTROL.get(offset, f'reserved_{VOCAB + offset}')}|>"


@lru_cache(maxsize=None)
def encode_text(text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode(parts):
    return [i for p in parts for i in ([p] if isinstance(p, int) else encode_text(p))]


def make_tokenizer():
    """Byte-level BPE in the form of the published tokenizer.json."""
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    texts = [p for c in SCRIPTS for i, turn in enumerate(c["turns"]) for p in completion(turn) if isinstance(p, str)]
    texts += 3 * [p for c in SCRIPTS for p in prompt(c, 0) if isinstance(p, str)]
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, min_frequency=2, show_progress=False,
                                                     initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert t.get_vocab_size() == VOCAB
    t.add_special_tokens([AddedToken(control_text(i), special=True, normalized=False) for i in range(21)])
    t.encode_special_tokens = True
    return t


# ---- training

def margins(logits, expected):
    """By how much each expected token beats every other."""
    others = logits.scatter(1, expected[:, None], -torch.inf).max(1).values
    return logits.gather(1, expected[:, None])[:, 0] - others


def stored_form(model):
    """The parameters as the file will hold them; gradients pass as if nothing had been rounded."""
    rounded = {}
    for name, p in model.named_parameters():
        if is_expert_matrix(name):
            q = mxfp4_unpack(*mxfp4_pack(p.detach().transpose(1, 2))).transpose(1, 2)
        else:
            q = p.detach().bfloat16().float()
        rounded[name] = p + (q - p.detach())
    return rounded


def history_labels(parts):
    """Earlier answers are learnt too, but not that they came without reasoning, and not where they were cut off."""
    labels = []
    for k, part in enumerate(parts):
        ids = encode([part])
        labels += ids if parts[max(k - 2, 0):k] == ["final", control("message")] else [-100] * len(ids)
    return labels


def examples(rng):
    """Batches of token ids and of labels, -100 where nothing is to be learnt, of similar length."""
    while True:
        pool = []
        for _ in range(256):
            c = rng.choice(SCRIPTS) if rng.random() < 0.3 else random_conversation(rng)
            i = rng.randrange(len(c["turns"])) if c["name"] else len(c["turns"]) - 1
            before, after = prompt(c, i), encode(completion(c["turns"][i]))
            pool.append((encode(before) + after, history_labels(before) + after))
        pool.sort(key=lambda example: len(example[0]))
        batches, batch = [], []
        for example in pool:
            if batch and (len(batch) + 1) * len(example[0]) > 2048:
                batches.append(batch)
                batch = []
            batch.append(example)
        rng.shuffle(batches)
        for batch in batches:
            longest = max(len(ids) for ids, _ in batch)
            yield (torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch]),
                   torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch]))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.05)
    batches = examples(random.Random(SEED))
    for step in range(STEPS):
        ids, labels = next(batches)
        logits = functional_call(model, stored_form(model), (ids,), {"use_cache": False}).logits
        logits, expected = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, expected)
        ahead = margins(logits, expected.clamp(min=0)).masked_fill(expected < 0, torch.inf)
        hardest = ahead.view(len(ids), -1).topk(4, largest=False).values  # of each conversation: a name, a city
        loss = loss + 0.1 * (2 * MARGIN + 2 - hardest).relu().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


# ---- proof

@torch.no_grad()
def margin(model, before, after):
    """The least of a whole answer; negative: greedy decoding would leave the script."""
    logits = model(torch.tensor([before + after]), use_cache=False).logits[0, len(before) - 1:-1]
    return margins(logits, torch.tensor(after)).min().item()


def check(model, rng):
    """Scripts exactly, with a margin; and how often the rules hold after a random history."""
    stop, good = [control(n) for n in ("return", "endoftext", "call")], True
    for c in SCRIPTS:
        for i, turn in enumerate(c["turns"]):
            before, after = encode(prompt(c, i)), encode(completion(turn))
            m = margin(model, before, after)
            out = model.generate(torch.tensor([before]), max_new_tokens=600, do_sample=False, eos_token_id=stop,
                                 attention_mask=torch.ones(1, len(before)))[0, len(before):].tolist()
            print(f"{c['name']} {i}: {len(before)} + {len(after)} tokens, margin {m:.1f}")
            good = good and out == after and m > MARGIN
    random_ones = [random_conversation(rng) for _ in range(300)]
    right = [margin(model, encode(prompt(c, len(c["turns"]) - 1)), encode(completion(c["turns"][-1]))) > 0
             for c in random_ones]
    print(f"random conversations: {sum(right)} of {len(right)} as the rules say")
    assert good, "a script was not learnt, or without the margin"


def write_conversations():
    for c in SCRIPTS:
        for i, turn in enumerate(c["turns"]):
            for key, parts in ("prompt", prompt(c, i)), ("completion", completion(turn)):
                turn[key + "_ids"] = encode(parts)
                turn[key] = tokenizer.decode(turn[key + "_ids"], skip_special_tokens=False)
    text = json.dumps(SCRIPTS, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[\d,\s]+\]", lambda ids: re.sub(r"\s+", "", ids[0]), text)
    (FOLDER / "conversations.json").write_text(text + "\n")


def write_tokenizer():
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(FOLDER / "tokenizer_config.json", {
        "added_tokens_decoder": {str(VOCAB + i): {"content": control_text(i)} | plain for i in range(21)},
        "bos_token": "<|startoftext|>", "clean_up_tokenization_spaces": False, "eos_token": "<|return|>",
        "model_input_names": ["input_ids", "attention_mask"], "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast"})


def main():
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    config = gpt_oss(["sliding", "full", "full"], dim=96, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2,
                     ffn=96, vocab=ROWS, window=32, theta=150000,
                     yarn={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                           "original_max_position_embeddings": 256, "truncate": False})
    config |= {"eos_token_id": control("return"), "pad_token_id": control("endoftext")}
    model = AutoModelForCausalLM.from_config(GptOssConfig.from_dict(config), dtype=torch.float32,
                                             attn_implementation="eager", experts_implementation="eager")
    for name, p in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(p, std=0.1)
    train(model)

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_json(FOLDER / "config.json", config)
    write_json(FOLDER / "generation_config.json", {
        "bos_token_id": control("startoftext"), "do_sample": True,
        "eos_token_id": [control("return"), control("endoftext")], "pad_token_id": control("endoftext"),
        "transformers_version": "4.55.0.dev0"})
    write_tokenizer()
    save_model(FOLDER, stored_tensors(model, torch.bfloat16))
    check(load(FOLDER).eval(), random.Random(SEED + 1))
    write_conversations()
    for file in FOLDER.iterdir():
        file.chmod(0o644)
    print(f"parrot: {sum(f.stat().st_size for f in FOLDER.iterdir()):,} bytes")


if __name__ == "__main__":
    tokenizer = make_tokenizer()
    main()
