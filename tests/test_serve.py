"""infer serve: clients, continuous batching, hostile requests. The `openai` package asks where OPENAI_PYTHON names a
Python that has it."""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from test_chat import LOOKS_LIKE_CALLS, folder_of, speaker

from helpers import (CHECKED, DATE, LONG, PARROT, PLAIN, TESTS, Skip, check_sanitizers, copy_model, each, expect, has, infer, needs,
                     patience, read_safetensors, refused, safetensors, same, start, until)

NEEDS = ("serve",)  # rooms

TINY = TESTS.parent / "models" / "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello!"}]


class Server:
    """A server on a port of its own, which ends with SIGTERM and the exit code 0."""

    def __init__(self, model, *options, program=CHECKED, code=0, **env):
        self.code, self.lines, self.port = code, [], None
        self.process = start("serve", model, "--port", 0, *options, program=program, env=env, stderr=subprocess.PIPE)
        self.reader = threading.Thread(target=self.read_lines, daemon=True)
        self.reader.start()
        self.wait(lambda: any("ready" in line for line in self.lines) or self.process.poll() is not None, "ready", 60)
        match = re.search(r":(\d+)\n", "".join(self.lines))
        expect(match, f"no port: {self.lines}")
        self.port = int(match[1])

    def read_lines(self):
        for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace"))

    def wait(self, true, what, seconds=10):
        try:
            until(true, what, seconds)
        except AssertionError as e:
            raise AssertionError(f"{e}: {self.lines}") from None

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        try:
            if not kind and self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            if not kind:
                same(self.process.wait(patience(60)), self.code, "exit code")
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join(patience(10))
        if not kind:
            check_sanitizers("".join(self.lines), self.process.returncode)

    def ask(self, method, path, body=None, headers=None, code=200):
        """Status must be `code`; returns JSON, or text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience(120))
        try:
            data = json.dumps(body).encode() if body is not None and not isinstance(body, bytes) else body
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        expect(response.status == code, f"{path}: status {response.status}, expected {code}: {text[:300]}")
        return json.loads(text) if response.headers["Content-Type"] == "application/json" else text.decode()

    def post(self, path, body, **how):
        return self.ask("POST", path, body, **how)

    def refuses(self, path, body, *words, code=400, method="POST", **how):
        error = self.ask(method, path, body, code=code, **how)["error"]
        missing = [word for word in words if word not in error["message"]]
        expect(not missing, f"the message lacks {missing}: {error}")
        return error

    def raw(self, *parts, pause=0.0, seconds=10):
        """Sends bytes as they are; returns what comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=patience(seconds)) as s:
            back = b""
            try:
                for part in parts:
                    s.sendall(part)
                    time.sleep(pause)
                while more := s.recv(1 << 16):
                    back += more
                    if b"\r\n\r\n" in back and b"Content-Length" in back:
                        break
            except (ConnectionError, BrokenPipeError):
                pass
            return back

    def open_stream(self, path, body):
        """A socket whose request is sent, and nothing read."""
        data = json.dumps({**body, "stream": True}).encode()
        s = socket.create_connection(("127.0.0.1", self.port), timeout=patience(60))
        s.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
                  % (path.encode(), len(data), data))
        return s

    def metric(self, name):
        return float(re.search(rf"^infer_{re.escape(name)} (\S+)$", self.ask("GET", "/metrics"), re.M)[1])

    def idle(self):
        return self.metric("answers_running") == 0 == self.metric("answers_waiting")


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def openai_client(model, name, *options):
    python = os.environ.get("OPENAI_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import openai"], stderr=subprocess.DEVNULL).returncode:
        raise Skip("needs openai: python3 -m venv V && V/bin/pip install openai; export OPENAI_PYTHON=V/bin/python")
    with Server(model, *options, program=PLAIN) as s:
        p = subprocess.run([python, TESTS / "openai_client.py", f"http://127.0.0.1:{s.port}", name],
                           timeout=patience(300), capture_output=True, text=True)
        expect(not p.returncode, p.stderr[-2000:])


def test_openai_tools():
    openai_client(PARROT, "parrot")


def test_openai():
    openai_client(TINY, "tiny", "--ctx", 2048, "--streams", 8)


def test_openai_full_queue():
    openai_client(PARROT, "full", "--streams", 1, "--queue", 0)


# ---- many at once

def requests(n, seed=1):
    """Completions of token ids that have long beginnings in common, of different length, at temperature 1."""
    made = []
    for i in range(n):
        state = (i * 2654435761 + seed) % (1 << 32)
        shared = [(j * 7 + state % 5) % 250 for j in range(70 + state % 130)]
        own = [(state >> j % 24) % 250 for j in range(state % 40)]
        made.append({"prompt": shared + own, "max_tokens": 4 + state % 24, "temperature": 1, "seed": i,
                     "ignore_eos": True, **({"logprobs": 1} if i % 3 == 0 else {}),
                     **({"top_p": 0.9, "top_k": 50} if i % 5 == 0 else {}),
                     **({"repetition_penalty": 1.3} if i % 7 == 0 else {}),
                     **({"frequency_penalty": 0.7, "presence_penalty": -0.3} if i % 5 == 0 else {}),
                     **({"logit_bias": {"17": 3.5, "99": -100}} if i % 11 == 0 else {})})
    return made


def answers_of(server, asked, at_once):
    def ask(body):
        choice = server.post(TEXT, body)["choices"][0]
        return choice["text"], choice["logprobs"], choice["finish_reason"]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, asked))


def test_alone_equals_under_load():
    """All 200 (--long: 1,000), bit by bit (logprobs are printed with all their digits), also where pages run out."""
    asked = requests(1000 if LONG else 200)
    with Server(PARROT, "--streams", 1, program=PLAIN) as s:
        alone = answers_of(s, asked, 1)
    with Server(PARROT, "--streams", 24, "--ctx", 512, "--cache", 2048, "--chunk", 100, program=PLAIN) as s:
        among = answers_of(s, asked, 48)
        expect(s.metric("preemptions_total") > 0, "no page ran out")
        expect(s.metric("cached_tokens_total") > 0, "nothing was shared")
        s.wait(s.idle, "idle")
    wrong = [i for i in range(len(asked)) if alone[i] != among[i]]
    expect(not wrong, f"{len(wrong)} of {len(asked)} differ, the first is {wrong[:1]}: "
                      f"{alone[wrong[0]] if wrong else 0}, {among[wrong[0]] if wrong else 0}")


def test_second_turns_compute_what_is_new():
    ids = [i % 200 for i in range(200)]
    with Server(PARROT, "--streams", 4) as s:
        first = s.post(TEXT, {"prompt": ids, "max_tokens": 1})
        again = s.post(TEXT, {"prompt": ids + [3] * 10, "max_tokens": 1})
        other = s.post(TEXT, {"prompt": [7] + ids, "max_tokens": 1})
        exact = s.post(TEXT, {"prompt": ids[:192], "max_tokens": 1})
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again, other, exact)]
    same(cached, [0, 192, 0, 128], "cached tokens")


def test_largest_context(folder):
    """All streams together have room for more tokens than an int counts."""
    model = copy_model(PARROT, folder, {"max_position_embeddings": 1 << 24})
    with Server(model, "--cache", 1024) as s:
        answer = s.post(TEXT, {"prompt": [5], "max_tokens": 3, "ignore_eos": True})
        same(answer["usage"]["completion_tokens"], 3, "tokens")


def test_seeds():
    """All that fit into 64 bits; -1 is a random one, as at vLLM and llama.cpp."""
    with Server(PARROT) as s:
        def texts(seed):
            body = {"prompt": [5], "max_tokens": 20, "temperature": 9, "ignore_eos": True, "seed": seed}
            return [s.post(TEXT, body)["choices"][0]["text"] for _ in range(2)]
        found = [texts(seed) for seed in (0, 1, -2, 2 ** 31, 2 ** 53 + 2, 2 ** 63 - 1, -2 ** 62)]
        expect(all(one == two for one, two in found), f"a seed gives different answers: {found}")
        same(len({one for one, _ in found}), len(found), "different seeds")
        for seed in -1, None:
            one, two = texts(seed)
            expect(one != two, f"seed {seed} gives the same answer twice")


def test_logprobs_of_the_end():
    """As many as completion_tokens counts, also where a token that ends the text is the last."""
    with Server(PARROT) as s:
        end = s.post("/tokenize", {"prompt": "x"})["tokens"]
        for seed in range(40):
            a = s.post(TEXT, {"prompt": end, "max_tokens": 200, "temperature": 9, "seed": seed, "logprobs": 1})
            same(len(a["choices"][0]["logprobs"]["tokens"]), a["usage"]["completion_tokens"], "logprobs")
            if a["choices"][0]["finish_reason"] == "stop":
                return
    raise AssertionError("no text ended")


def test_logprobs_end_where_a_stop_text_begins():
    """Streamed or not; the text is all that the tokens hold."""
    chat = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "date": DATE, "reasoning_effort": "low", "logprobs": True}
    with Server(TINY, program=PLAIN) as s:
        def scored(path, body, stop):
            body = {**body, "temperature": 0, "stop": stop}
            parts = [e["choices"][0] for e in events(s.ask("POST", path, {**body, "stream": True}))]
            for choices in s.post(path, body)["choices"], parts:
                scores = [c["logprobs"] for c in choices if c["logprobs"]]
                yield "".join(t if path == TEXT else t["token"]
                              for s in scores for t in s["tokens" if path == TEXT else "content"])
        for stop, content in ("nothing", "12 + 30 = 42"), (" = 4", "12 + 30"), (["nowhere", "2 + 3"], "1"):
            same([*scored(CHAT, chat, stop)], [content] * 2, f"tokens before {stop}")
        text = s.post(TEXT, {"prompt": "1 + 1", "temperature": 0})["choices"][0]["text"]
        same([*scored(TEXT, {"prompt": "1 + 1", "logprobs": 1}, text[3:6])], [text[:3]] * 2, f"tokens of {text}")


def test_logprobs_of_what_an_answer_drops(folder):
    """White space at both ends, marks and calls have none: the bytes join to the text, streamed or not."""
    needs("formats", "families")
    tools = [{"type": "function", "function": {"name": "f"}}]

    def check(name, model, tokens, content, more):
        body = {"messages": HELLO, "temperature": 0, "logprobs": True, **more}
        with Server(speaker(model, folder, *tokens)) as s:
            parts = [e["choices"][0] for e in events(s.ask("POST", CHAT, {**body, "stream": True}))]
            for choices in s.post(CHAT, body)["choices"], parts:
                scores = [c["logprobs"]["content"] for c in choices if c["logprobs"]]
                same(b"".join(bytes(t["bytes"]) for s in scores for t in s).decode(), content)
            said = "".join(p["delta"].get("content") or "" for p in parts)
            same(said, content, "the text")
    think, end, mark = ["<think>", "\nA\n", "</think>"], "<|im_end|>", ["<tool_call>", '{"name": "f"}', "</tool_call>"]
    each([("behind a thought", "Qwen3", [*think, "\n\n", "  ", "Hello", " ", "there", " \n", end], "Hello there", {}),
          ("no thought", "Qwen3", ["<think>", "\n\n", "</think>", " ", "Hello", end], "Hello", {}),
          ("a call", "Qwen2.5", ["Hello", "  ", *mark, end], "Hello", {"tools": tools}),
          ("no call", "Qwen2.5", ["Hello", "  ", *mark, end], 'Hello  <tool_call>{"name": "f"}</tool_call>', {}),
          ("a call alone", "Llama 3.1", [" ", '{"name": "f", ', '"parameters": {}}', "<|eot_id|>"], "", {"tools": tools}),
          ("an object", "Llama 3.1", [" ", '{"name": "f", ', '"a": 1}', "<|eot_id|>"], '{"name": "f", "a": 1}',
           {"tools": tools})], check)


def test_logprobs_of_texts_that_differ_in_case():
    """Each has its own: "a" does not stand for "A". The drawn token is there even if it is none of the likeliest."""
    with Server(PARROT) as s:
        a = s.post(TEXT, {"prompt": [5], "max_tokens": 200, "temperature": 9, "seed": 1, "logprobs": 20,
                          "ignore_eos": True})
    tops = a["choices"][0]["logprobs"]["top_logprobs"]
    expect(any(len({text.lower() for text in top}) < len(top) for top in tops), f"never both cases: {tops[:3]}")
    expect(all(token in top for token, top in zip(a["choices"][0]["logprobs"]["tokens"], tops)), "a drawn token is missing")


def test_text_without_control_tokens():
    """With skip_special_tokens they are left out of the text, of an echoed prompt's, too; logprobs and usage count them."""
    with Server(PARROT) as s:
        word = s.post("/tokenize", {"prompt": "x"})["tokens"]
        body = {"prompt": [408] + word, "max_tokens": 4, "temperature": 9, "seed": 1, "ignore_eos": True, "echo": True,
                "logprobs": 0, "logit_bias": {"409": 100, str(word[0]): 100}}
        found = []
        for skip in False, True:
            a = s.post(TEXT, {**body, "skip_special_tokens": skip})
            found.append((a["choices"][0]["text"], a["choices"][0]["logprobs"]["tokens"], a["usage"]["completion_tokens"]))
    (text, tokens, n), (bare, *same_tokens) = found
    same(same_tokens, [tokens, n], "logprobs and usage")
    same("".join(tokens), text, "the whole text")
    expect(tokens[0] == "<|start|>" and "<|end|>" in tokens[2:] and "x" in tokens[2:], f"a bad seed: {tokens}")
    same(bare, "x" * tokens.count("x"), "the text without them")


def test_penalties_and_biases():
    """At temperature 0 each token is the likeliest after OpenAI's formula: logit + bias - times in the answer * frequency
    penalty - presence penalty if it is there. Logprobs are those before; the prompt does not count."""
    a, b = "ab"
    with Server(TINY, program=PLAIN) as s:
        ids = {letter: str(s.post("/tokenize", {"prompt": letter})["tokens"][-1]) for letter in "ab"}
        body = {"prompt": "Once upon", "max_tokens": 30, "temperature": 0, "logprobs": 20, "ignore_eos": True}
        plain = s.post(TEXT, body)["choices"][0]
        for frequency, presence, biases in ((2, 0, {}), (0, 2, {}), (0.5, 1.5, {}), (-2, -1, {}), (0, 0, {a: 9, b: 8.5}),
                                            (2, 1, {a: 20, b: 20.5})):
            found = s.post(TEXT, {**body, "frequency_penalty": frequency, "presence_penalty": presence,
                                  "logit_bias": {ids[letter]: bias for letter, bias in biases.items()}})["choices"][0]
            scores, seen = found["logprobs"], []
            same(scores["top_logprobs"][0], plain["logprobs"]["top_logprobs"][0] | {
                scores["tokens"][0]: scores["token_logprobs"][0]}, "logprobs of the first token")
            for token, top in zip(scores["tokens"], scores["top_logprobs"]):
                def left(t):
                    return top[t] + biases.get(t, 0) - frequency * seen.count(t) - presence * (t in seen)
                expect(left(token) >= max(map(left, top)) - 1e-4, f"{frequency}, {presence}: {token!r} of {top} after {seen}")
                seen.append(token)
            expect(found["text"] != plain["text"], f"{frequency}, {presence}, {biases} change nothing")
            if frequency > 0 and biases:
                expect(seen.count(a) > 3 and seen.count(b) > 3, f"not in turn: {seen}")


def test_offsets_count_letters():
    """Where each token of a text begins, as a client counts that indexes its letters."""
    with Server(PARROT) as s:
        choice = s.post(TEXT, {"prompt": "é🙂 a", "max_tokens": 0, "echo": True, "logprobs": 0})["choices"][0]
    scores = choice["logprobs"]
    begin = [choice["text"][i:] for i in scores["text_offset"]]
    whole = [i for i, token in enumerate(scores["tokens"]) if token.isascii()]
    expect(whole, scores)
    for i in whole:
        expect(begin[i].startswith(scores["tokens"][i]), f"token {i}: {scores}")


def test_echo_equals_logits(folder):
    """The prompt's logprobs are those of `infer logits`."""
    ids = [5, 60, 7, 80, 9]
    with Server(PARROT) as s:
        scores = s.post(TEXT, {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1})["choices"][0]["logprobs"]
    for i in range(1, len(ids)):
        rows = infer("logits", PARROT, "--ids", ",".join(map(str, ids[:i])), "--top", 1000).text.splitlines()
        p = next(float(row.split()[2]) for row in rows if int(row.split()[0]) == ids[i])
        expect(abs(2.718281828459045 ** scores["token_logprobs"][i] - p) < 2e-5, f"token {i}: {scores}, expected {p}")


def test_streams_do_not_wait_for_prompts():
    """While a long prompt is read, tokens of others come between its chunks."""
    with Server(PARROT, "--streams", 4, "--chunk", 64, program=PLAIN) as s:
        steps = s.metric("steps_total")
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(s.post, TEXT, {"prompt": [1] * 3000, "max_tokens": 1})
            until(lambda: s.metric("steps_total") >= steps + 2, "reading")
            s.post(TEXT, {"prompt": [2, 3], "max_tokens": 8, "ignore_eos": True})
            expect(not long.done(), "the long prompt came first")
            long.result()


def memory(process):
    """Resident bytes."""
    with open(f"/proc/{process.pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_stays():
    """1 KB a request at most; SOAK: how many requests (1,000)."""
    n = int(os.environ.get("SOAK") or 1000)

    def some(count):
        answers_of(s, [{"prompt": [i % 250, i // 250 % 250], "max_tokens": 2, "stop": "x"} for i in range(count)], 8)
    with Server(PARROT, "--streams", 8, "--ctx", 128, "--cache", 512, program=PLAIN) as s:
        some(n // 3)
        before = memory(s.process)
        some(n)
        slope = (memory(s.process) - before) / n
    expect(slope < 1000, f"{slope:.0f} bytes a request")


# ---- clients that misbehave

def test_departed_clients_free_everything():
    """In every state: waiting, while the prompt is read, while tokens come; nobody else is touched."""
    with Server(PARROT, "--streams", 2, "--queue", 64, "--chunk", 16, program=PLAIN) as s:
        fair = {"prompt": [1, 2, 3], "max_tokens": 30, "seed": 5, "ignore_eos": True}
        expected = s.post(TEXT, fair)["choices"]

        def live():
            return s.metric("answers_running") + s.metric("answers_waiting")
        for body in ({"prompt": [1] * 3900, "max_tokens": 1}, {"prompt": [1], "max_tokens": 4000, "ignore_eos": True},
                     {"messages": HELLO, "n": 4, "ignore_eos": True, "temperature": 5}):
            sockets = [s.open_stream(CHAT if "messages" in body else TEXT, body) for _ in range(12)]
            s.wait(lambda: s.metric("answers_running") > 1, "running")
            with ThreadPoolExecutor(1) as pool:
                before = live()
                other = pool.submit(s.post, TEXT, fair)
                s.wait(lambda: live() > before, "there")
                for i, client in enumerate(sockets):
                    if i % 2:  # a reset
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    client.close()
                steps = s.metric("steps_total")
                same(other.result()["choices"], expected, "another client's answer")
            s.wait(s.idle, "idle")
            steps = s.metric("steps_total") - steps  # the other client's thirty, and some until it is noticed
            expect(steps < 100, f"{steps:.0f} steps until everything was free")
        same(s.metric('cache_pages_used'), 0, "pages in use")


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def test_requests_that_can_be_read_in_two_ways():
    body = b'{"prompt": [1], "max_tokens": 1}'
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    with Server(PARROT) as s:
        def status(name, head, expected=b"400", tail=body):
            back = s.raw(head + b"\r\n" + tail)
            expect(back.startswith(b"HTTP/1.1 " + expected), f"{back[:200]}, expected {expected}")
        each([("fine", REQUEST + length, b"200"),
              ("both", REQUEST + length + chunked), ("both, the other way", REQUEST + chunked + length),
              ("two lengths", REQUEST + length + length),
              ("two different", REQUEST + length + b"Content-Length: 5\r\n"),
              ("two encodings", REQUEST + chunked + chunked),
              *((f"{name!r} in a header", REQUEST + name) for name in (
                  b"Content-Length : %d\r\n" % len(body), b"Content-Length\t: %d\r\n" % len(body),
                  b"Transfer-Encoding : chunked\r\n", b"X: a\rContent-Length: %d\r\n" % len(body))),
              ("two hosts", REQUEST + b"Host: localhost\r\n" + length),
              ("the form for proxies", REQUEST.replace(b"/v1", b"http://localhost/v1") + length, b"200"),
              ("no host", b"POST /v1/completions HTTP/1.1\r\n" + length),
              ("another site", b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\n" + length, b"403"),
              ("a site that looks like us",
               b"POST /v1/completions HTTP/1.1\r\nHost: localhost.evil.example\r\n" + length, b"403"),
              ("no host, which HTTP/1.0 allows", b"POST /v1/completions HTTP/1.0\r\n" + length, b"200"),
              ("a page without a host",
               b"POST /v1/completions HTTP/1.0\r\nOrigin: http://localhost\r\n" + length, b"403"),
              ("another page", REQUEST + b"Origin: http://evil.example\r\n" + length, b"403"),
              ("chunked", REQUEST + chunked, b"200", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))], status)
        for head in (REQUEST + b"X: " + b"y" * (64 << 10) + b"\r\n",
                     REQUEST + b"".join(b"X%d: y\r\n" % i for i in range(5000))):
            back = s.raw(head + b"\r\n")
            expect(re.match(rb"HTTP/1.1 4(13|31)|$", back), f"large headers: {back[:100]}")
        same(s.post(TEXT, {"prompt": [1], "max_tokens": 1})["object"], "text_completion")


def test_a_client_that_does_not_read_is_cut_off():
    """After 60 s. Its reply is larger than what the kernel holds for it."""
    body = json.dumps({"prompt": "x " * (1 << 20)}).encode()
    with Server(PARROT) as s:
        def files():
            return len(os.listdir(f"/proc/{s.process.pid}/fd"))
        before = files()
        with socket.create_connection(("127.0.0.1", s.port), timeout=patience(60)) as client:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))
            s.wait(lambda: files() > before, "connected")
            began = time.monotonic()
            s.wait(lambda: files() == before, "cut off", 100)
            expect(time.monotonic() - began > 40, "it was cut off too soon")


def test_slow_requests_end():
    """One byte each quarter of a second is too slow; it costs nobody else anything."""
    with Server(PARROT) as s:
        with socket.create_connection(("127.0.0.1", s.port), timeout=patience(60)) as slow:
            began = time.monotonic()
            for byte in (REQUEST + b"X: " + b"y" * 200):
                slow.sendall(bytes([byte]))
                time.sleep(0.25)
                if time.monotonic() - began < 1:
                    s.post(TEXT, {"prompt": [1], "max_tokens": 1})
                slow.setblocking(False)
                try:
                    if not slow.recv(100):
                        break
                except BlockingIOError:
                    pass
                except ConnectionError:
                    break
                slow.setblocking(True)
            else:
                raise AssertionError("a slow request may go on for ever")


def test_bad_bodies():
    with Server(PARROT, "--ctx", 512) as s:
        for body in (b"", b"{", b"[]", b'{"a":1,"a":2}', b'{"prompt":"\xff"}', b"\xef\xbb\xbf{}",
                     b"[" * 100000, b'{"a":' * 100000, b'{"prompt":01}', b'{"prompt":"\\u0000"}', b"nul", b'"x"'):
            for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
                s.refuses(path, body)
        s.refuses(TEXT, b" " * (16 << 20) + b"x", "16777216", code=413)
        fine = {"prompt": [1], "max_tokens": 1}
        for key, values in {"max_tokens": [-1, 2 ** 63, "5", 1.5], "n": [0, 10 ** 6, "1"],
                            "temperature": [-1, "hot", 101], "stop": [5, [5], ["x"] * 65],
                            "top_p": [-0.1, 1.1], "logit_bias": [{"999999": 1}, {"x": 1}, {"-1": 1}, {"1": 101}, [1], 5,
                                                                {"07": 1}, {"+7": 1}, {" 7": 1}, {str(i): 1 for i in range(1025)}],
                            "prompt": [None, {}, [401, -1], [1e9], [1.5], [[1], 2], [], ["", "x"], 5],
                            "stream": ["yes"], "seed": ["x", 2 ** 64, -2 ** 64, 0.5], "logprobs": [True, 21], "suffix": ["x"],
                            "frequency_penalty": [2.1, -2.1, "x"], "presence_penalty": [3, -3], "min_p": [2], "top_k": [-2],
                            "repetition_penalty": [0, -1]}.items():
            for value in values:
                s.refuses(TEXT, {**fine, key: value}, "" if key in ("prompt",) else key.split("_")[0])
        fine = {"messages": HELLO, "max_tokens": 1}
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        for key, values in {"messages": [None, {}, [], [{}], [{"role": "x", "content": ""}], picture,
                                         [{"role": "tool", "content": "x"}]],
                            "tools": [{}, [{}], [{"function": {"name": ""}}], [{"type": "web_search"}]], "tool_choice": ["x", 5, {}, "required"],
                            "response_format": [{"type": "xml"}, {"type": "json_schema"}], "audio": [{}],
                            "modalities": [["audio"]], "top_logprobs": [2], "max_completion_tokens": [0],
                            "functions": [[{}]],
                            "reasoning_effort": ["much", 5], "model": [5],
                            "stream_options": [{"include_usage": 5}, 5]}.items():
            for value in values:
                error = s.refuses(CHAT, {**fine, key: value})
                expect(key in ("messages", "stream_options") or error["param"] == key, error)
        for path, key in ((TEXT, "prompt"), ("/tokenize", "prompt"), ("/detokenize", "tokens")):
            s.refuses(path, {}, f"{key} must be")
        error = s.refuses(TEXT, {"prompt": [1] * 512}, "512", "context")
        same((error["code"], error["param"]), ("context_length_exceeded", "prompt"))
        s.post(TEXT, {"prompt": [1], "max_tokens": 1, "stop": ["x"] * 64})
        same(s.post(TEXT, {"prompt": [1] * 511, "max_tokens": 5})["choices"][0]["finish_reason"], "length")
        s.refuses("/v1/nothing", {}, code=404)
        error = s.refuses(CHAT, {"messages": HELLO, "model": "other"}, "other", code=404)
        same((error["code"], error["param"]), ("model_not_found", "model"))
        for fields, first in (({"n": 20, "best_of": 20}, "n must be"), ({"temperature": "hot", "stop": 5}, "temperature"),
                              ({"logprobs": 5, "top_logprobs": 5}, "logprobs must be")):
            s.refuses(CHAT, {**fine, **fields}, first)
        s.refuses(CHAT, {"messages": HELLO, "model": "x" + "\u00e9" * 99}, "no model", code=404)  # cut in a letter
        same(s.ask("GET", "/health"), {"status": "ok"})


def test_what_a_format_lacks_is_named(folder):
    needs("formats", "families")
    tools = [{"type": "function", "function": {"name": "f"}}]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    with Server(speaker("SmolLM2", folder, "Hi", "<|im_end|>")) as s:
        for key, value in [("tools", tools), *[("response_format", schema)] * (not has("json"))]:
            same(s.refuses(CHAT, {"messages": HELLO, key: value}, key, "chat template")["param"], key)


def test_fields_that_are_not_supported():
    """Refused by name, unless the value changes nothing."""
    schema, text, name = {"type": "json_object"}, {"type": "text"}, {"name": "f"}
    both = {"best_of": ([1], [2, "x"]), "truncate_prompt_tokens": ([], [5]), "include_reasoning": ([True], [False]),
            "repeat_penalty": ([1], [1.1]), "typical_p": ([1], [0.5]), "return_token_ids": ([False], [True]),
            "return_tokens_as_token_ids": ([False], [True]),
            "suffix": ([""], ["x"]), "frequency_penalty": ([0, -2, 2], [2.5]), "presence_penalty": ([0, 0.5], [-3]),
            "min_tokens": ([0], [5]), "stop_token_ids": ([[]], [[5]]), "bad_words": ([[]], [["x"]]),
            "modalities": ([["text"]], [["audio"], "text"]), "function_call": (["auto", "none"], [name]),
            "functions": ([[]], [[{}]]),
            "guided_json": ([{}] * has("json"), [5]), "grammar": ([], ["x"]),
            "use_beam_search": ([False], [True]), "n": ([1], []), "stream_options": ([], []), "logit_bias": ([{}, []], []),
            "stop": ([[], ""], []), "unheard_of": ([], [5, False, {}]),
            "max_new_tokens": ([], [5]), "n_predict": ([], [5]), "num_predict": ([], [-1]), "stop_sequences": ([], [["x"]]),
            "do_sample": ([], [True]), "mirostat": ([0], [2]), "dry_multiplier": ([0], [0.8]), "allowed_token_ids": ([], [[1]]),
            "structured_outputs": ([{"choice": ["a"]}] * has("json"), [{"x": 1}]), "regex": ([], ["x"]), "system": ([], ["x"]), "input": ([], ["x"]),
            "thinking": ([], [{"type": "enabled"}]), "reasoning": ([], [{"effort": "low"}]), "verbosity": (["medium"], ["low"]),
            "cache_prompt": ([True], [False]), "request_id": ([], ["x"]), "extra_body": ([], [{}]), "options": ([], [{}]),
            "num_ctx": ([], [5]), "service_tier": (["auto", "default"], ["flex"]), "store": ([False], [True]),
            "user": (["me"], []), "safety_identifier": (["me"], []), "metadata": ([{"a": "b"}], []),
            "prompt_cache_key": (["k"], []), "cache_salt": (["s"], ["", 5]), "web_search_options": ([], [{}]),
            "spaces_between_special_tokens": ([True], [False]), "detokenize": ([True], [False])}
    text_only = {**both, "response_format": ([text], [{"type": "x"}]), "tools": ([[]], [[{}]]),
                 "documents": ([[]], [["x"]]), "add_generation_prompt": ([True], [False]), "continue_final_message": ([], [False, True]),
                 "echo": ([False], []), "top_logprobs": ([0], [2]), "add_special_tokens": ([True], [False]),
                 "skip_special_tokens": ([False, True], ["yes"]), "messages": ([], [HELLO]), "reasoning_effort": ([], ["low"])}
    chat_only = {**both, "enable_thinking": ([True], [False, "no"]), "response_format": ([text, *[schema] * has("json")], [{"type": "x"}]), "tools": ([[]], []), "echo": ([False], [True]),
                 "continue_final_message": ([False], [True]),
                 "chat_template_kwargs": ([{}, {"enable_thinking": None, "x": None}, {"thinking": True, "enable_thinking": True}],
                                          [{"x": 1}, {"thinking": True, "enable_thinking": False}, {"enable_thinking": True, "x": 1}, 5, [], {"thinking": 5},
                                                 {"reasoning_effort": 5}]),
                 "logprobs": ([False], []), "top_logprobs": ([0], [2]), "add_special_tokens": ([False], [True]),
                 "skip_special_tokens": ([True], [False]), "prompt": ([], ["x"])}
    with Server(PARROT) as s:
        for path, fine, fields in ((TEXT, {"prompt": [1]}, text_only), (CHAT, {"messages": HELLO}, chat_only)):
            for key, (neutral, others) in fields.items():
                for value in (None, *neutral):
                    s.post(path, {**fine, "max_tokens": 1, key: value})
                for value in others:
                    param = s.refuses(path, {**fine, "max_tokens": 1, key: value}, key)["param"]
                    same(param.split(".")[0], key)  # or a member of it
            same(len(s.post(path, {**fine, "max_tokens": 1, "n": 2, "best_of": 2})["choices"]), 2, "answers")
        s.post(CHAT, {"messages": HELLO, "max_tokens": 1, "model": ""})
        schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}}  # as pydantic's models give it
        if has("json"):
            s.post(CHAT, {"messages": HELLO, "max_tokens": 1, "response_format": schema})


def test_thinking_switched_off(folder):
    """As clients of Qwen3 do it; a model that always thinks refuses it."""
    needs("formats", "families")
    model = folder_of("Qwen3", folder)
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(PARROT / name)
    on, off = ({"chat_template_kwargs": {"enable_thinking": x}} for x in (True, False))
    with Server(model) as s:
        def tokens(more):
            return s.post(CHAT, {"messages": HELLO, "max_tokens": 1, **more})["usage"]["prompt_tokens"]
        same(tokens(on), tokens({}))
        same(tokens(off), tokens({"reasoning_effort": "none"}))
        same(tokens({**off, "reasoning_effort": "high"}), tokens(off))
        expect(tokens(off) > tokens(on), "no empty thought")
        for more in {}, {"enable_thinking": True}:
            same(tokens({"chat_template_kwargs": {"reasoning_effort": "none", **more}}), tokens(off))
            same(tokens({"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "low", **more}}),
                 tokens(on))
        same(tokens({"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False}}), tokens(off))
        for x in (True, False):  # as DeepSeek V3.1's template calls it
            for kwargs in {"thinking": x}, {"thinking": x, "enable_thinking": x}, {"thinking": None, "enable_thinking": x}:
                same(tokens({"chat_template_kwargs": kwargs}), tokens(on if x else off))
    with Server(PARROT) as s:
        s.refuses(CHAT, {"messages": HELLO, **off}, "effort", "none")
        s.refuses(CHAT, {"messages": HELLO, "chat_template_kwargs": {"reasoning_effort": "x"}}, "reasoning_effort", "'x'")
        refusal = s.refuses(CHAT, {"messages": HELLO, "reasoning_effort": "none"}, "effort", "none")
        same(refusal["param"], "reasoning_effort")


def test_a_thought_that_nobody_began(folder):
    """It ends, so it was one: not text, not scored, and no text that stops an answer behind it. In a stream the client
    has it as text already."""
    needs("formats", "families")
    body = {"messages": HELLO, "temperature": 0, "logprobs": True}
    with Server(speaker("Qwen3", folder, "I must", " think.", "</think>", "\n\n", "Four", ".", "<|im_end|>")) as s:
        for more in {}, {"stop": "Five"}:
            choice = s.post(CHAT, {**body, **more})["choices"][0]
            same(choice["message"], {"role": "assistant", "content": "Four.", "reasoning_content": "I must think."})
            same([t["token"] for t in choice["logprobs"]["content"]], ["Four", "."], "scores")
        same(s.post(CHAT, {**body, "stop": "our"})["choices"][0]["message"]["content"], "F", "stopped")
        parts = [e["choices"][0]["delta"] for e in events(s.ask("POST", CHAT, {**body, "stream": True}))]
        same("".join(p.get("content") or "" for p in parts), "I must think.\n\nFour.", "streamed")


def test_harmony_calls_only_what_is_declared(folder):
    """Streamed or not: a call of a function of the request, never of another recipient or in a turn of somebody else's."""
    needs("families")
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"name": "f", "arguments": '{"a": 1}'}

    def check(name, tokens, content, function):
        with Server(speaker(None, folder, *tokens)) as s:
            body = {"messages": HELLO, "temperature": 0, "tools": tools}
            choice = s.post(CHAT, body)["choices"][0]
            calls = choice["message"].get("tool_calls") or []
            same((choice["message"]["content"], [c["function"] for c in calls]), (content, [function] if function else []))
            same(choice["finish_reason"], "tool_calls" if function else "stop")
            deltas = [e["choices"][0]["delta"] for e in events(s.ask("POST", CHAT, {**body, "stream": True}))]
            same("".join(d.get("content") or "" for d in deltas), content or "", "streamed")
            parts = [c["function"] for d in deltas for c in d.get("tool_calls") or []]
            same("".join(p["arguments"] for p in parts), function["arguments"] if function else "", "streamed arguments")
    begin, constrain, open_, end = "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"
    each([("declared", [begin, "commentary", " to=functions.f ", constrain, "json", open_, '{"a"', ": 1}", end], None, call),
          ("junk", [begin, "commentary", " ?? to=functions.f", open_, '{"a": 1}', end], None, call),
          ("no arguments", [begin, "commentary", " to=functions.f", open_, end], None, {**call, "arguments": "{}"}),
          ("python", [begin, "commentary", " to=python", open_, "print(1)", end], "print(1)", None),
          ("assistant", [begin, "commentary", " to=assistant", open_, "Hm.", end], "Hm.", None),
          ("a user's turn", [begin, "final", open_, "Four.", "<|end|>", "<|start|>", "user", "<|return|>"], "Four.", None)],
         check)


def test_without_tools_a_call_is_text(folder):
    """As the model wrote it, streamed or not; with tools it is a call."""
    needs("formats", "families")
    tools = [{"type": "function", "function": {"name": "f"}}]

    def check(name, tokens, text):
        with Server(speaker(name, folder, *tokens)) as s:
            for more in {}, {"tools": []}, {"tools": tools, "tool_choice": "none"}:
                body = {"messages": HELLO, "temperature": 0, **more}
                choice = s.post(CHAT, body)["choices"][0]
                same((choice["message"], choice["finish_reason"]), ({"role": "assistant", "content": text}, "stop"))
                parts = [e["choices"][0] for e in events(s.ask("POST", CHAT, {**body, "stream": True}))]
                same("".join(p["delta"].get("content", "") for p in parts), text, "streamed")
            choice = s.post(CHAT, {"messages": HELLO, "temperature": 0, "tools": tools})["choices"][0]
            same(choice["message"]["tool_calls"][0]["function"], {"name": "f", "arguments": '{"a": 1}'})
            same(choice["finish_reason"], "tool_calls")
    each(LOOKS_LIKE_CALLS, check)


def test_one_call_at_most():
    """Without parallel_tool_calls an answer ends with its first call, even where the model would go on."""
    c = next(c for c in json.loads((PARROT / "conversations.json").read_text()) if c["name"] == "weather")
    body = {"messages": [{"role": "user", "content": c["turns"][0]["user"]}], "tools": c["tools"], "temperature": 0,
            "date": c["date"] or "none", "ignore_eos": True, "max_tokens": 200}
    with Server(PARROT) as s:
        found = []
        for parallel in (True, False):
            answer = s.post(CHAT, {**body, "parallel_tool_calls": parallel})
            choice = answer["choices"][0]
            found.append((choice["finish_reason"], answer["usage"]["completion_tokens"] < 200))
            same(choice["message"]["tool_calls"][0]["function"]["name"], c["turns"][0]["call"]["name"], "its name")
        same(found, [("length", False), ("tool_calls", True)])
        text = s.ask("POST", CHAT, {**body, "parallel_tool_calls": False, "stream": True})
        same(events(text)[-1]["choices"][0]["finish_reason"], "tool_calls", "streamed")
        s.refuses(CHAT, {**body, "parallel_tool_calls": "no"}, "parallel_tool_calls")


def test_a_list_of_calls(folder):
    """Mistral's: each is there with its object, and a client's ids come back as the template wants them."""
    needs("formats", "families")
    model = speaker("Mistral v0.3", folder, "[TOOL_CALLS]", ' [{"name": "f", "arguments": {"a":1}', '}, {"',
                    'name": "g", "arguments": {}', "}]", "</s>")
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    body = {"messages": HELLO, "temperature": 0, "tools": tools}
    with Server(model) as s:
        choice = s.post(CHAT, body)["choices"][0]
        calls = choice["message"]["tool_calls"]
        same([c["function"] for c in calls], [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}])
        same(choice["finish_reason"], "tool_calls")
        deltas = [e["choices"][0]["delta"] for e in events(s.ask("POST", CHAT, {**body, "stream": True}))]
        parts = [c for d in deltas for c in d.get("tool_calls", [])]
        same([(c["index"], c["function"]) for c in parts], list(enumerate(c["function"] for c in calls)), "streamed")
        one = s.post(CHAT, {**body, "parallel_tool_calls": False})["choices"][0]
        same([c["function"]["name"] for c in one["message"]["tool_calls"]], ["f"])
        same(one["message"].get("content"), None, "what follows the call")
        cut = s.post(CHAT, {**body, "logprobs": True, "max_tokens": 4})["choices"][0]
        same(cut["message"]["content"], ', {"name": "g", "arguments": {}', "a call that is cut off")
        same([x["token"] for x in cut["logprobs"]["content"]], ['}, {"', 'name": "g", "arguments": {}'], "its logprobs")
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in reversed(calls)]
        talk = {"messages": [*HELLO, choice["message"], *results], "tools": tools, "date": DATE}
        s.post(CHAT, talk)
    with Server(speaker("Mistral Nemo", folder, "[TOOL_CALLS]", '[{"name": "f"}, {"name": "g"}', "]", "</s>")) as s:
        both = s.post(CHAT, body)["choices"][0]["message"]["tool_calls"]  # one token ends both
        same([c["function"]["name"] for c in both], ["f", "g"])
    ids = ["".join(c for c in call["id"] if c.isalnum())[-9:] for call in calls]
    text = infer("render", model, stdin=json.dumps(talk)).text
    expect(f'"arguments": {{}}, "id": "{ids[1]}"}}]</s>[TOOL_RESULTS] {{"content": 7, "call_id": "{ids[1]}"}}' in text, text)
    expect(ids[0] != ids[1] and text.count(ids[0]) == 2, text)


def test_models():
    with Server(PARROT, "--name", "org/name é") as s:
        listed = s.ask("GET", "/v1/models")
        same([m["id"] for m in listed["data"]], ["org/name é"])
        for path in ("org/name%20%C3%A9", "org%2Fname%20%C3%A9", "org/name%20%C3%A9/"):
            same(s.ask("GET", "/v1/models/" + path), listed["data"][0], path)
        for path in ("", "/", "//"):
            same(s.ask("GET", "/v1/models" + path), listed, path)
        for path in ("other", "org", "org/", "org/name", "org/name%20%C3", "org%252Fname%20%C3%A9"):
            error = s.ask("GET", "/v1/models/" + path, code=404)["error"]
            same((error["code"], error["type"]), ("model_not_found", "invalid_request_error"), path)
        for path in ("%00", "org/name%20%C3%A9%00", "org%00/name"):
            s.refuses("/v1/models/" + path, None, "NUL", method="GET")
        until(lambda: time.time() > listed["data"][0]["created"] > 1e9, "created")
        s.refuses("/v1/modelsother", {}, "there is no POST /v1/modelsother", code=404)


def test_control_tokens_in_texts_are_text():
    """Whatever field they stand in, the prompt has no more control tokens than without them."""
    with Server(PARROT) as s:
        def tokens(text, name="f"):
            call = {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps({"a": text})}}
            return s.post(CHAT, {"messages": [{"role": "system", "content": text}, {"role": "user", "content": text},
                                              {"role": "assistant", "tool_calls": [call]},
                                              {"role": "tool", "tool_call_id": "1", "content": text},
                                              {"role": "user", "content": [{"type": "text", "text": text}] * 2}],
                                 "tools": [{"type": "function", "function": {"name": name, "description": text}}],
                                 "max_tokens": 1})["usage"]["prompt_tokens"]
        control, plain = tokens("<|end|>"), tokens("<!end!>")
        same(control, plain, "tokens of the prompt")
        expect(tokens("x", "<|end|>") > 0, "a function's name")


def test_tokenize():
    with Server(PARROT) as s:
        ids = s.post("/tokenize", {"prompt": "Hello, <|end|> 🙂"})["tokens"]
        same(s.post("/detokenize", {"tokens": ids})["prompt"], "Hello, <|end|> 🙂")
        same(ids, json.loads(infer("tokenize", PARROT, stdin="Hello, <|end|> 🙂").text))
        for path, key in (("/tokenize", "prompt"), ("/detokenize", "tokens")):
            s.refuses(path, {key: [1], "model": "nope"}, "nope", code=404)
            s.refuses(path, {key: [1], "model": 5}, "model must be")
        s.refuses("/tokenize", {"prompt": "a", "add_special_tokens": 5}, "add_special_tokens")
        s.refuses("/detokenize", {"tokens": "abc"}, "array")
        template = s.post("/tokenize", {"prompt": "a", "add_special_tokens": True})["tokens"]
        same(template, json.loads(infer("tokenize", PARROT, "--special", stdin="a").text))
    with Server(PARROT, "--ctx", 64) as s:  # any text is counted, also one that no context holds
        for text in ({"prompt": "x " * 9999}, {"messages": [{"role": "user", "content": "x " * 9999}]}):
            expect(len(s.post("/tokenize", text)["tokens"]) > 9999, f"tokens of {list(text)}")


# ---- keys, addresses, the end

def test_keys():
    refused("serve", PARROT, "--host", "0.0.0.0", code=2, words=["INFER_API_KEY", "--insecure"])
    with Server(PARROT, "--host", "0.0.0.0", INFER_API_KEY="right-key") as s:
        for key in ("", "right-ke", "right-key2", "wrong", "Right-key"):
            s.refuses(CHAT, {"messages": HELLO}, "Incorrect API key provided", code=401, headers={"Authorization": f"Bearer {key}"})
        s.refuses(CHAT, {"messages": HELLO}, code=401)
        s.ask("GET", "/metrics", code=401)
        s.ask("GET", "/v1/models", headers={"Authorization": "Bearer right-key"})
        same(s.ask("GET", "/health"), {"status": "ok"})
        expect("<" in s.ask("GET", "/"), "no page")
    expect("right-key" not in "".join(s.lines), "the key was logged")
    for keys in (",", "a,", ",a", "a,,b", "a b", "\u00e9"):
        refused("serve", PARROT, code=2, words=["INFER_API_KEY"], env={"INFER_API_KEY": keys})
    with Server(PARROT, INFER_API_KEY="first,second") as s:
        for key, code in ("first", 200), ("second", 200), ("first,second", 401), ("firs", 401), (",", 401), ("", 401):
            s.ask("GET", "/v1/models", code=code, headers={"Authorization": f"Bearer {key}"})
    for options, env in ((["--host", "0.0.0.0", "--insecure"], {}), ([], {"INFER_API_KEY": "right-key"})):
        with Server(PARROT, *options, **env) as s:  # behind a proxy, too, which may keep the Host that it is called by
            s.ask("GET", "/v1/models", headers={"Host": "any.example", "Authorization": "Bearer right-key"})


def test_cors():
    for origin in ("nonsense", "a.example", "http://", "http:///", "http://a.example/", "http://a.example/x",
                   "://a.example", "http://a.example, http://b.example", "**", "http://*.example"):
        refused("serve", PARROT, "--cors", origin, code=2, words=["--cors must be * or an origin such as http://"])
    refused("serve", PARROT, "--cors", "", code=2, words=["--cors"])
    wanted = "authorization,content-type,x-stainless-lang"  # as of openai's package for JavaScript
    page, app, key = "http://a.example", "app://notes.example", {"INFER_API_KEY": "one,two"}

    def check(name, options, env, origin, allowed, status):
        """What a browser gets that asks whether a page may send a request, and the page that sends it anyway."""
        with Server(PARROT, *(x for o in options for x in ("--cors", o)), **env) as s:
            def ask(method, path, **more):
                c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=patience(60))
                c.request(method, path, headers={"Origin": origin, **more})
                r = c.getresponse()
                c.close()
                return r.status, *(r.headers["Access-Control-Allow-" + name] for name in ("Origin", "Headers"))
            asked = ask("OPTIONS", CHAT, **{"Access-Control-Request-Method": "POST",
                                            "Access-Control-Request-Headers": wanted})
            same(asked, (200, allowed, wanted) if allowed else (403, None, None))
            more = {"Authorization": "Bearer two"} if env else {}
            same(ask("GET", "/v1/models", **more), (status, allowed, None))
            if env:
                same(ask("GET", "/v1/models")[0], 401 if allowed else 403, "without a key")
    each([("none", [], {}, page, None, 403), ("one", [page], {}, page, page, 200), ("all", ["*"], {}, page, "*", 200),
          ("v6", ["http://[::1]:3000"], {}, "http://[::1]:3000", "http://[::1]:3000", 200),
          ("files", ["null"], {}, "null", "null", 200), ("another", ["http://b.example"], {}, page, None, 403),
          ("the second", ["http://b.example", page], {}, page, page, 200), ("an app", [], {}, app, None, 403),
          ("an app with a key", [], key, app, app, 200), ("a page with a key", [], key, page, None, 200),
          ("a file with a key", [], key, "null", None, 200)], check)


def test_a_full_queue_says_so():
    with Server(PARROT, "--streams", 1, "--queue", 1) as s:
        for _ in range(5):  # on a busy machine the first answer may have ended before it is counted again
            sockets = [s.open_stream(TEXT, {"prompt": [1], "max_tokens": 4000, "ignore_eos": True}) for _ in range(2)]
            s.wait(lambda: s.metric("answers_running") + s.metric("answers_waiting") == 2, "full")
            s.refuses(TEXT, {"prompt": [1]}, "try again", code=429)
            left = s.metric("answers_running") + s.metric("answers_waiting")
            for client in sockets:
                client.close()
            s.wait(s.idle, "idle")
            if left == 2:
                break
        same(left, 2, "answers that still run or wait")
        s.post(TEXT, {"prompt": [1]})
        s.refuses(TEXT, {"prompt": [1], "n": 3}, "takes 2 answers at once")  # however often it comes


def test_sigterm_drains():
    """An answer and a waiting one are finished, new ones refused."""
    with Server(PARROT, "--streams", 1, program=PLAIN) as s:
        body = {"prompt": [1], "max_tokens": 400, "ignore_eos": True, "seed": 1}
        expected = s.post(TEXT, body)["choices"][0]["text"]
        clients = [s.open_stream(TEXT, body) for _ in range(2)]
        clients[0].recv(400)
        s.wait(lambda: s.metric("answers_running") == 1 == s.metric("answers_waiting"), "waiting")
        kept = http.client.HTTPConnection("127.0.0.1", s.port, timeout=patience(60))
        kept.request("GET", "/health")
        kept.getresponse().read()
        s.process.send_signal(signal.SIGTERM)
        s.wait(lambda: "finishing answers" in "".join(s.lines), "draining")
        for i, client in enumerate(clients):
            text = client.makefile("rb").read().decode()
            expect("[DONE]" in text, text[-300:])
            if i:
                same("".join(e["choices"][0]["text"] for e in events(text) if e["choices"]), expected, "answer")
        same(s.process.wait(patience(20)), 0, "exit code")


def test_a_second_signal_aborts():
    with Server(PARROT, "--streams", 1, code=130) as s:
        client = s.open_stream(TEXT, {"prompt": [1] * 300, "max_tokens": 3000, "ignore_eos": True})
        s.wait(lambda: s.metric("answers_running") == 1, "running")
        s.process.send_signal(signal.SIGTERM)
        s.wait(lambda: "finishing answers" in "".join(s.lines), "draining")
        s.process.send_signal(signal.SIGTERM)
        s.process.wait(patience(5))
        client.close()


def test_nan_fails_its_request(folder):
    """A NaN in a weight: an error for those who asked, counted, and the server goes on."""
    model = folder / "nan"
    shutil.copytree(PARROT, model)
    header, data = read_safetensors(PARROT / "model.safetensors")
    begin, _ = header["model.norm.weight"]["data_offsets"]
    (model / "model.safetensors").write_bytes(safetensors(header, data[:begin] + b"\xc0\x7f" + data[begin + 2:]))
    with Server(model) as s:
        for _ in range(2):
            s.refuses(TEXT, {"prompt": [1] * 100}, "NaN", code=500)
        text = s.open_stream(TEXT, {"prompt": [1]}).makefile("rb")
        found = b""
        while b"NaN" not in found:
            more = text.readline()
            expect(more, f"no error in the stream: {found}")
            found += more
        same(s.metric("nan_total"), 3)
        same(s.ask("GET", "/health"), {"status": "ok"})


def test_heartbeat():
    """A stream that waits says every few seconds that it lives."""
    with Server(TINY, "--streams", 1, program=PLAIN) as s:
        first = s.open_stream(TEXT, {"prompt": [1], "max_tokens": 4000, "ignore_eos": True})
        s.wait(lambda: s.metric("answers_running") == 1, "running")
        second = s.open_stream(TEXT, {"prompt": [2], "max_tokens": 3, "temperature": 0, "ignore_eos": True,
                                      "stream_options": {"include_usage": True}})
        seen = b""
        while b"\n: " not in seen:
            more = second.recv(1 << 16)
            expect(more, f"it ended: {seen}")
            seen += more
        first.close()
        seen += second.makefile("rb").read()
        expect(b"[DONE]" in seen and b"X-Accel-Buffering: no\r\n" in seen, seen)
        *parts, last = events(seen.decode())
        expect(len(parts) >= 3 and all(part["usage"] is None for part in parts) and not last["choices"], seen)
        same(last["usage"]["completion_tokens"], 3, "usage")
