"""infer serve as HTTP: paths and methods, headers, errors, metrics, the log, fair shares, limits of memory and number."""
import http.client
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from helpers import PARROT, PLAIN, Skip, each, expect, patience, refused, same, until
from test_serve import CHAT, HELLO, REQUEST, TEXT, TINY, Server, events, memory

NEEDS = ("serve",)  # rooms

LONG = {"prompt": [1], "max_tokens": 3000, "ignore_eos": True}


def parts(reply):
    """Status, headers in small letters, body of raw bytes, of which there must be one reply."""
    head, _, body = reply.partition(b"\r\n\r\n")
    same(len(re.findall(rb"HTTP/1\.1 \d", reply)), 1, f"status lines of {reply[:300]}")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}, body


def exchange(server, data):
    """Sends bytes as they are; returns all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience(5)) as s:
        s.sendall(data)
        return b"".join(iter(lambda: s.recv(1 << 16), b""))


def asked(server, method, path, body=None, address=None, **headers):
    """The same of an ordinary request, perhaps from another address."""
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patience(60),
                                   source_address=(address, 0) if address else None)
    try:
        c.request(method, path, json.dumps(body) if body is not None else None, headers)
        r = c.getresponse()
        return r.status, {k.lower(): v for k, v in r.getheaders()}, r.read()
    finally:
        c.close()


# ---- paths, methods, errors

def test_paths_and_methods():
    with Server(PARROT, program=PLAIN) as s:
        def check(name, method, path, status, allow=None):
            found, headers, body = asked(s, method, path, {} if method in ("POST", "PUT") else None)
            same((found, headers.get("allow")), (status, allow))
            if status >= 400:
                expect(method == "HEAD" or set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, body)
        get, post = "GET, HEAD", "POST"
        each([(f"{method} {path}", method, path, *expected) for method, path, *expected in (
            ("GET", "/health", 200), ("GET", "/health/", 200), ("HEAD", "/health//", 200), ("GET", "/health?x=%2F", 200),
            ("GET", "/v1/models/", 200), ("GET", "/v1/models/parrot/", 200), ("GET", "/metrics/", 200), ("GET", "/", 200),
            ("GET", CHAT, 405, post), ("DELETE", TEXT + "/", 405, post), ("PUT", "/v1/models/parrot", 405, get),
            ("POST", "/health", 405, get), ("DELETE", "/", 405, get), ("HEAD", CHAT, 405, post),
            ("OPTIONS", "/metrics", 405, get), ("GET", "/v1", 404), ("GET", "/v1%2Fmodels", 404),
            ("GET", "/v1/models%2Fparrot", 404), ("GET", "/health%2F", 404), ("GET", "/health%00", 404),
            ("GET", "/%68ealth", 404), ("GET", "/healthy", 404), ("POST", "/v1/chat/completionsx", 404))], check)
        for path in (CHAT + "/", TEXT + "//"):
            same(asked(s, "POST", path, {"messages": HELLO, "max_tokens": 1} if path.startswith(CHAT) else
                       {"prompt": [1], "max_tokens": 1})[0], 200, path)


def test_errors_are_json():
    """Before the body is here, where it cannot be read, or where a proxy might read it otherwise: one reply, at once."""
    length, chunked, expects = b"Content-Length: 33\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n"
    huge = b"Content-Length: 99999999999\r\n"
    with Server(PARROT, program=PLAIN, INFER_API_KEY="key") as s:
        key = b"Authorization: Bearer key\r\n"

        def check(name, head, status, words):
            began = time.monotonic()
            found, headers, body = parts(exchange(s, head + b"\r\n"))
            same((found, headers["content-type"], headers["connection"]), (status, "application/json", "close"))
            expect(words in json.loads(body)["error"]["message"], body)
            expect(time.monotonic() - began < patience(2), "it waited")
        each([("gzip", REQUEST + key + b"Transfer-Encoding: gzip\r\n", 501, "gzip"),
              ("identity", REQUEST + key + b"Transfer-Encoding: identity\r\n", 501, "identity"),
              ("two", REQUEST + key + b"Transfer-Encoding: gzip, chunked\r\n", 501, "chunked"),
              ("both", REQUEST + key + length + chunked, 400, "two ways"),
              ("no key", REQUEST + length + expects, 401, "API key"),
              ("a wrong key", REQUEST + b"Authorization: Bearer kez\r\n" + chunked + expects, 401, "API key"),
              ("too large", REQUEST + key + huge + expects, 413, "16777216"),
              ("another method", REQUEST.replace(b"POST", b"PUT") + key + length + expects, 405, "POST"),
              ("another path", REQUEST.replace(b"completions", b"x") + key + length + expects, 404, "/v1/x"),
              ("another site", REQUEST + b"Origin: http://evil.example\r\n" + length + expects, 403, "--cors"),
              ("large headers", REQUEST + key + b"X: " + b"y" * 40000 + b"\r\n", 431, "32768")], check)
        body = b'{"prompt": [1], "max_tokens": 1}'
        back = s.raw(REQUEST + key + expects + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body), body, pause=0.2)
        expect(back.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"), back)


def test_curl():
    """It waits for a reply before it sends a large body, and sees one line."""
    if not shutil.which("curl"):
        raise Skip("needs curl")
    with Server(PARROT, program=PLAIN, INFER_API_KEY="key") as s:
        def curl(*how, path=CHAT):
            p = subprocess.run(["curl", "-sS", "-i", "-m", str(int(patience(20))), *how,
                                f"http://127.0.0.1:{s.port}{path}"], capture_output=True, text=True,
                               input=json.dumps({"messages": HELLO, "user": "x" * (2 << 20)}))
            same(p.returncode, 0, p.stderr)
            return p.stdout
        text = curl("--data-binary", "@-")
        expect(text.startswith("HTTP/1.1 401") and text.count("HTTP/1.1") == 1 and "Incorrect API key" in text, text[:500])
        key = ["-H", "Authorization: Bearer key"]
        expect("HTTP/1.1 200" in curl("--data-binary", "@-", *key), "a large body")
        text = curl("-N", *key, "-d", json.dumps({"messages": HELLO, "stream": True, "max_tokens": 3}))
        expect(text.rstrip().endswith("data: [DONE]") and events(text), text)


def test_errors_name_what_was_sent():
    """message and param begin with the field at fault, with its place in it."""
    tool = {"type": "function", "function": {"name": "f"}}
    with Server(PARROT, program=PLAIN) as s:
        def check(name, path, body, param, *words):
            error = s.refuses(path, body, *words)
            same(error["param"], param, error["message"])
        chat, text = {"messages": HELLO}, {"prompt": [1]}
        named = {"type": "function", "function": {"name": "my <g>"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
        cases = [({**chat, key: value}, param or key) for key, value, param in (
            ("n", 0, None), ("n", 17, None), ("max_tokens", 0, None), ("max_completion_tokens", 0, None),
            ("temperature", -1, None), ("top_p", 2, None), ("seed", "x", None), ("stream", 1, None), ("stop", 5, None),
            ("stop", "x" * 5000, None), ("stream_options", 5, None),
            ("stream_options", {"include_usage": 5}, "stream_options.include_usage"),
            ("stream_options", {"chunk": 5}, "stream_options.chunk"), ("logit_bias", {"x": 1}, None),
            ("top_logprobs", 2, None), ("best_of", 5, None), ("tools", {}, None), ("tool_choice", "x", None),
            ("tool_choice", "required", None), ("tool_choice", named, None), ("tool_choice", allowed, "tool_choice.allowed_tools"),
            ("reasoning_effort", "much", None), ("reasoning_effort", 5, None), ("chat_template_kwargs", {"x": 1}, None),
            ("response_format", {"type": "x"}, None), ("messages", [], None), ("messages", 5, None),
            ("messages", [{"role": "x", "content": ""}], "messages[0]"),
            ("messages", [*HELLO, {"role": "user", "content": 5}], "messages[1].content"),
            ("date", 5, None), ("cache_salt", "", None), ("unheard.of x", 1, None), ("model", 5, None))]
        each([(str(body)[50:120], CHAT, body, param) for body, param in cases], check)
        each([("no messages", CHAT, {}, "messages"), ("no prompt", TEXT, {}, "prompt"),
              ("a name", CHAT, {**chat, "tools": [tool], "tool_choice": named}, "tool_choice", "my <g>"),
              ("an id", TEXT, {"prompt": [1, 2, 1 << 40]}, "prompt[2]"), ("a prompt", TEXT, {"prompt": 5}, "prompt"),
              ("many", TEXT, {"prompt": [[1]] * 129}, "prompt", "129"), ("empty", TEXT, {"prompt": []}, "prompt"),
              ("prompts times n", TEXT, {"prompt": [[1]] * 20, "n": 10}, "prompt", "200"),
              ("an id to detokenize", "/detokenize", {"tokens": [0, -1]}, "tokens[1]"),
              ("no tokens", "/detokenize", {}, "tokens"), ("unknown", "/tokenize", {"prompt": "", "x": 1}, "x"),
              ("in another place", "/detokenize", {"tokens": [], "prompt": "x"}, "prompt"),
              ("too long", CHAT, {"messages": [{"role": "user", "content": "x " * 9000}]}, "messages",
               "maximum context length is 4096 tokens")], check)


def test_efforts():
    """OpenAI's other names for efforts are the nearest of a model's three."""
    with Server(PARROT, program=PLAIN) as s:
        def answer(effort):
            return s.post("/tokenize", {"messages": HELLO, "reasoning_effort": effort})["tokens"]
        same(answer("minimal"), answer("low"), "minimal")
        same(answer("xhigh"), answer("high"), "xhigh")
        expect(answer("low") != answer("high"), "no efforts")
        s.refuses(CHAT, {"messages": HELLO, "reasoning_effort": "none"}, "none")


def test_tokens_of_messages():
    """As many as usage counts, with and without the beginning of an answer, tools and forced calls."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    with Server(PARROT, program=PLAIN) as s:
        def tokens(**more):
            return s.post("/tokenize", {"messages": HELLO, **more})
        for more in {}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}:
            usage = s.post(CHAT, {"messages": HELLO, "max_tokens": 1, **more})["usage"]["prompt_tokens"]
            found = tokens(**more)
            same((found["count"], len(found["tokens"]), found["max_model_len"]), (usage, usage, 4096))
        whole, cut = tokens()["tokens"], tokens(add_generation_prompt=False)["tokens"]
        expect(len(cut) < len(whole) and whole[:len(cut)] == cut, "the beginning of an answer")
        # allowed_tools: as if the others were not there
        def allowed(mode, *names):
            return {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}}}
        same(tokens(**allowed("auto", "g")), tokens(tools=tools[1:]))
        same(tokens(**allowed("auto", "f", "g")), tokens(tools=tools))
        call = s.post(CHAT, {"messages": HELLO, "max_tokens": 20, **allowed("required", "g")})["choices"][0]
        same(call["message"]["tool_calls"][0]["function"]["name"], "g")
        for mode, names in ("x", ["f"]), ("auto", ["h"]), (None, ["f"]):
            s.refuses(CHAT, {"messages": HELLO, **allowed(mode, *names)}, "tool_choice.allowed_tools")


# ---- kept prefixes

def test_kept_prefixes_of_keys_and_salts():
    """Only what the same key has read with the same salt shows in cached_tokens. Without keys and salts all share."""
    body = {"prompt": [i % 200 for i in range(200)], "max_tokens": 1}

    def cached(server, key=None, **more):
        how = {"headers": {"Authorization": f"Bearer {key}"}} if key else {}
        return server.post(TEXT, {**body, **more}, **how)["usage"]["prompt_tokens_details"]["cached_tokens"]
    with Server(PARROT) as s:
        same([cached(s), cached(s), cached(s, cache_salt="a"), cached(s, cache_salt="a"), cached(s, cache_salt="b"),
              cached(s)], [0, 192, 0, 192, 0, 192])
    with Server(PARROT, INFER_API_KEY="one,two") as s:
        same([cached(s, "one"), cached(s, "one"), cached(s, "two"), cached(s, "two"), cached(s, "one", cache_salt="a"),
              cached(s, "two", cache_salt="a"), cached(s, "one", cache_salt="a")], [0, 192, 0, 192, 0, 0, 192])


# ---- metrics and the log

def test_metrics():
    with Server(PARROT, "--streams", 2, program=PLAIN) as s:
        s.post(TEXT, {"prompt": [1], "max_tokens": 3, "ignore_eos": True})
        s.post(CHAT, {"messages": HELLO, "max_tokens": 1, "n": 2})
        s.refuses(CHAT, {})
        s.ask("GET", "/nowhere", code=404)
        client = s.open_stream(TEXT, LONG)
        s.wait(lambda: b"data:" in client.recv(1 << 16), "begun")
        client.close()
        s.wait(s.idle, "idle")
        s.wait(lambda: 'completions",status="499"' in s.ask("GET", "/metrics"), "499")
        text = s.ask("GET", "/metrics")
        value = dict(re.findall(r"^infer_(\S+) (\S+)$", text, re.M))
        for name, expected in {f'requests_total{{endpoint="{TEXT}",status="200"}}': 1, 'answers_total{finish_reason="length"}': 3,
                               f'requests_total{{endpoint="{CHAT}",status="200"}}': 1, 'answers_total{finish_reason="error"}': 1,
                               f'requests_total{{endpoint="{CHAT}",status="400"}}': 1, "request_seconds_count": 2,
                               f'requests_total{{endpoint="{TEXT}",status="499"}}': 1, "queue_seconds_count": 4,
                               'requests_total{endpoint="other",status="404"}': 1}.items():
            same(float(value[name]), expected, name)
        expect('request_seconds_bucket{le="0.00025"}' in value, "no small bucket")
        expect(re.search(r'build_info{version="[\d.]+",backend="reference",fingerprint="fp_\w{16}",model="parrot"} 1', text), text)
        expect("/metrics" in s.ask("GET", "/metrics"), "itself")
    if not shutil.which("promtool"):
        raise Skip("needs promtool: apt install prometheus")
    p = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    same((p.returncode, p.stdout + p.stderr), (0, ""), "promtool")


def test_a_streams_status_is_that_of_its_end(folder):
    """A stream that the server gives up counts as the error that its last event has."""
    with Server(PARROT, "--drain", 4, "--log", "all", program=PLAIN) as s:
        client = s.open_stream(TEXT, {**LONG, "prompt": [1] * 900, "n": 8})
        client.recv(300)
        s.process.send_signal(signal.SIGTERM)
        text = client.makefile("rb").read().decode()
        s.process.wait(patience(20))
    expect('"error"' in text and "[DONE]" not in text, text[-300:])
    lines = [line for line in s.lines if "infer: request" in line]
    expect(any(" 500, " in line and "the server ends" in line for line in lines), lines)


def test_log():
    """A line a request: what, from whom, how it ended, with the id that the reply has, or that the client gave."""
    refused("serve", PARROT, "--log", "some", code=2, words=["--log", "off, errors or all"])
    for which, lines in ("off", 0), ("errors", 1), ("all", 3):
        with Server(PARROT, "--log", which) as s:
            ids = [asked(s, "GET", "/health")[1]["x-request-id"],
                   asked(s, "POST", TEXT, {"prompt": [1], "max_tokens": 2, "ignore_eos": True},
                         **{"X-Request-Id": "my-id.7"})[1]["x-request-id"],
                   asked(s, "GET", "/a%1b[31mb", **{"X-Request-Id": "no word"})[1]["x-request-id"]]
        found = [line for line in s.lines if "infer: request" in line]
        same(len(found), lines, which)
        same(ids[1], "my-id.7")
        expect(all(re.fullmatch(r"[0-9a-f]{16}", i) for i in (ids[0], ids[2])) and ids[0] != ids[2], ids)
        said = "".join(found)  # a line is written when its reply has gone: the next request may be there before
        if which == "all":
            expect(re.search(r"^infer: request my-id.7 from 127.0.0.1: POST /v1/completions 200, \d+\.\d+ s, "
                             r"1 \+ 2 tokens$", said, re.M), found)
        if lines:
            expect(f"request {ids[2]} from 127.0.0.1: GET /a%1b[31mb 404, " in said, found)


def test_fingerprint(folder):
    """Of the model and the program: the same after a restart, another one for other weights."""
    def of(model):
        with Server(model, program=PLAIN) as s:
            chat = s.post(CHAT, {"messages": HELLO, "max_tokens": 2})
            stream = events(s.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 2, "stream": True}))
            text = s.post(TEXT, {"prompt": [1], "max_tokens": 1})
            found = {a["system_fingerprint"] for a in (chat, text, *stream)}
            same(len(found), 1, "fingerprints")
            expect(abs(chat["created"] - time.time()) < patience(10), "created")
            return found.pop()
    first = of(PARROT)
    same(of(PARROT), first)
    expect(of(TINY) != first, "of another model")


# ---- shares and limits

def test_clients_share_the_queue():
    """Of an address with seventy requests and another with one, the other waits for one answer, not for seventy."""
    with Server(PARROT, "--streams", 1, "--queue", 100, program=PLAIN) as s:
        body = {"prompt": [1], "max_tokens": 20, "ignore_eos": True}
        ended = []

        def ask(address):
            status = asked(s, "POST", TEXT, body, address)[0]
            ended.append(address)
            same(status, 200)
        with ThreadPoolExecutor(71) as pool:
            for _ in range(70):
                pool.submit(ask, "127.0.0.1")
            s.wait(lambda: s.metric("answers_waiting") >= 50 or len(ended) > 10, "waiting")
            before = len(ended)
            pool.submit(ask, "127.0.0.2").result()
            place = ended.index("127.0.0.2") - before
        expect(place < 15, f"{place} answers came first")  # the scheduler has some already


def test_a_client_leaves_places_for_others():
    """The last quarter of the queue is for those who have no answer in it; Retry-After is an estimate."""
    with Server(PARROT, "--streams", 1, "--queue", 8, program=PLAIN) as s:
        s.post(TEXT, {"prompt": [1], "max_tokens": 300, "ignore_eos": True})
        sockets = [s.open_stream(TEXT, {**LONG, "max_tokens": 4000}) for _ in range(7)]
        s.wait(lambda: s.metric("answers_running") + s.metric("answers_waiting") == 7, "full")
        status, headers, body = asked(s, "POST", TEXT, LONG)
        same(status, 429)
        expect(1 <= int(headers["retry-after"]) <= 60 and b"7 of them yours" in body, (headers, body))
        other = http.client.HTTPConnection("127.0.0.1", s.port, source_address=("127.0.0.2", 0), timeout=patience(60))
        other.request("POST", TEXT, json.dumps({**LONG, "stream": True}))
        same(other.getresponse().status, 200)
        for client in (*sockets, other):
            client.close()
        s.wait(s.idle, "idle")


def test_slow_connections():
    """576 connections that send nothing more do not stop /health; their address gets 503, others are served."""
    with Server(PARROT, program=PLAIN) as s:
        slow = []
        for i in range(580):
            c = socket.create_connection(("127.0.0.1", s.port), timeout=patience(60))
            c.sendall(REQUEST if i % 2 else b"GET")
            slow.append(c)
        s.wait(lambda: s.metric("connections") > 576, "connected")
        same(s.ask("GET", "/health"), {"status": "ok"})
        status, headers, body = asked(s, "POST", TEXT, {"prompt": [1], "max_tokens": 1})
        same((status, "retry-after" in headers), (503, True), body)
        expect("connections" in json.loads(body)["error"]["message"], body)
        same(asked(s, "POST", TEXT, {"prompt": [1], "max_tokens": 1}, "127.0.0.2")[0], 200, "another address")
        for c in slow:
            c.close()
        s.wait(lambda: s.metric("connections") < 5, "closed")
        s.post(TEXT, {"prompt": [1], "max_tokens": 1})


def peak(process):
    """The most resident bytes so far."""
    with open(f"/proc/{process.pid}/status") as f:
        return int(re.search(r"VmHWM:\s*(\d+)", f.read())[1]) << 10


def test_large_bodies():
    """A prompt that no context can hold is refused by its bytes, before it is tokenised."""
    n = 15 << 20
    words, word, ids = b'"' + b"abc " * (n // 4) + b'"', b'"' + b"a" * n + b'"', b"[" + b"1," * (n // 2) + b"1]"
    bodies = {"words": b'{"prompt":%s}' % words, "one word": b'{"prompt":%s}' % word, "ids": b'{"prompt":%s}' % ids,
              "arrays": b'{"prompt":[%s[]]}' % (b"[]," * (n // 3)),
              "a message": b'{"messages":[{"role":"user","content":%s}]}' % words,
              "what was thought": b'{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y",'
                                  b'"reasoning_content":%s}]}' % word}
    with Server(PARROT, program=PLAIN) as s:
        def send(body):
            return asked_bytes(s, CHAT if b"messages" in body[:20] else TEXT, body)
        for name, body in bodies.items():
            with ThreadPoolExecutor(8) as pool:
                for status, reply in pool.map(send, [body] * 8):
                    expect(status == (200 if "thought" in name else 413 if body[-2:] == b"]}" and name != "a message" else 400),
                           f"{name}: {status} {reply[:200]}")
            most = peak(s.process) / 1e6
            expect(most < 300, f"{name}: {most:.0f} MB")
        same(s.ask("GET", "/health"), {"status": "ok"})


def half_sent(server, n, address="127.0.0.1"):
    """A connection with the first n bytes of a body of 16 MB."""
    s = socket.create_connection(("127.0.0.1", server.port), timeout=patience(60), source_address=(address, 0))
    s.sendall(REQUEST + b"Content-Length: %d\r\n\r\n" % (16 << 20) + b" " * n)
    return s


def test_large_bodies_take_turns():
    """Four are read at once. The others wait unread, and the next is of a client that had none yet; those that leave are
    forgotten. A reply that nobody reads holds up nobody."""
    large = json.dumps({"prompt": "x " * (1 << 19)}).encode()
    with Server(PARROT, "--log", "all", program=PLAIN) as s:
        def tokenized(address):
            return asked_bytes(s, "/tokenize", large, address)[0]
        read = [half_sent(s, 12 << 20) for _ in range(4)]  # more than the kernel holds
        waiting = [half_sent(s, 1 << 17) for _ in range(8)]
        s.wait(lambda: s.metric("connections") == 13, "connected")
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(tokenized, "127.0.0.2")
            s.wait(lambda: s.metric("connections") == 14, "connected")
            s.post(TEXT, {"prompt": "a small one", "max_tokens": 1})
            expect(not other.done(), "five bodies at once")
            read.pop().close()
            same(other.result(patience(5)), 200, "another client's")
        for client in read + waiting:
            client.close()
        s.wait(lambda: s.metric("connections") == 1, "closed")
        same(sum(" 499, " in line for line in s.lines), 12, "clients that left")
        unread = [socket.create_connection(("127.0.0.1", s.port), timeout=patience(60)) for _ in range(3)]
        for client in unread:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(large), large))
        same([tokenized("127.0.0.2") for _ in range(3)], [200] * 3)
        for client in unread:
            client.close()


def test_every_connection_is_at_work():
    """None can be closed to make room: who comes then gets 503, and /health answers."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    text = json.dumps({"prompt": "x " * (1 << 20)}).encode()
    with Server(PARROT, "--streams", 1, "--queue", 0, program=PLAIN) as s:
        clients = [socket.create_connection(("127.0.0.1", s.port), timeout=patience(60)) for _ in range(4)]
        for client in clients:  # they do not read their replies, and so keep the memory for bodies
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (16 << 20, text.ljust(16 << 20)))

        def refuses():
            status, headers, body = asked(s, "POST", TEXT, {"prompt": [1], "max_tokens": 1}, "127.0.0.9")
            clients.append(half_sent(s, 70000, f"127.0.0.{2 + len(clients) % 5}"))
            return status == 503 and "retry-after" in headers and b"the server has 1" in body
        while len(clients) < 4 * 257:
            clients.append(half_sent(s, 70000, f"127.0.0.{2 + len(clients) % 5}"))
        until(refuses, "refused")
        same(s.ask("GET", "/health"), {"status": "ok"})
        for client in clients:
            client.close()
        s.wait(lambda: s.metric("connections") < 5, "closed")
        s.post(TEXT, {"prompt": [1], "max_tokens": 1})


def test_a_body_that_nothing_reads():
    """Of a preflight, and of a request that is refused."""
    with Server(PARROT, "--cors", "http://a.example") as s:
        body = "x" * (1 << 20)
        same(asked(s, "OPTIONS", CHAT, body, Origin="http://a.example")[0], 200)
        same(asked(s, "PUT", CHAT, body)[0], 405)
        same(asked(s, "POST", "/nowhere", body)[0], 404)


def asked_bytes(server, path, body, address=None):
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patience(120),
                                   source_address=(address, 0) if address else None)
    try:
        c.request("POST", path, body)
        r = c.getresponse()
        return r.status, r.read()
    finally:
        c.close()


def test_many_messages_take_linear_time():
    """Twice as many take about twice as long, whoever wrote them."""
    with Server(PARROT, program=PLAIN) as s:
        def seconds(n, *roles):
            messages = [{"role": role, "content": ""} for role in roles] * (n // len(roles))
            began = time.monotonic()
            asked_bytes(s, CHAT, json.dumps({"messages": messages}).encode())
            return time.monotonic() - began
        for roles in (["user"], ["user", "assistant"], ["system"]):
            few, many = seconds(50000, *roles), seconds(200000, *roles)
            expect(many < 8 * few + 1, f"{roles}: {few:.2f} s for 50,000, {many:.2f} s for 200,000")


def test_many_allowed_tools_take_linear_time():
    with Server(PARROT, program=PLAIN) as s:
        def seconds(n):
            tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]
            allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[::-1]}}
            began = time.monotonic()
            s.refuses(CHAT, {"messages": HELLO, "tools": tools, "tool_choice": allowed}, "context length")
            return time.monotonic() - began
        few, many = seconds(10000), seconds(40000)
        expect(many < 8 * few + 1, f"{few:.2f} s for 10,000, {many:.2f} s for 40,000")
