"""`infer bench` on a small model: what it counts, not how fast it is."""
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from helpers import TESTS, Terminal, each, expect, has, infer, needs, refused, same, slowness
from test_serve import Server

NEEDS = ("commands",)  # rooms

TINY = TESTS.parent / "models" / "tiny"


def test_rows():
    """A row for each prompt and each depth and number of streams, with the bytes that a step reads."""
    options = "-p 16 -n 4 -d 0,100 -b 1,2 -r 3 -o json".split()
    found = json.loads(infer("bench", TINY, *options).text)
    same([(r["kind"], r["tokens"], r["depth"], r["streams"]) for r in found["rows"]],
         [("prompt", 16, 0, 1)] + [("generate", 4, d, b) for b in (1, 2) for d in (0, 100)], "rows")
    for r in found["rows"]:
        same(r["least"] <= r["tokens_per_second"] <= r["most"], True, f"the median of {r}")
    config = json.loads((TINY / "config.json").read_text())
    dim, ffn, layers = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv, size, n, k = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim",
                                                       "num_local_experts", "num_experts_per_tok"))
    q, window = heads * size, config["sliding_window"]
    for r in found["rows"][1:]:
        chosen = r["experts"]  # tests/check.h knows whether they are counted rightly
        same(k <= chosen <= min(n, k * r["streams"]), True, f"{chosen} experts of {r['streams']} streams")
        expert = 3 * ffn * dim * 17 // 32 + 4 * (2 * ffn + dim)  # 4.25 bits a weight, biases in fp32
        layer = 2 * (2 * q * dim + 2 * kv * size * dim + n * dim) + 4 * (q + 2 * kv * size + dim + n) + 8 * dim
        seen = r["depth"] + r["tokens"] // 2 + 1
        cache = sum(min(seen, window if kind == "sliding_attention" else seen) for kind in config["layer_types"])
        head, cached = 2 * dim * config["vocab_size"], r["streams"] * cache * 4 * kv * size
        expected = layers * (layer + chosen * expert) + head + cached
        near = abs(r["step_bytes"] - expected) < 0.006 * layers * expert + 1  # "experts" has two decimals
        same(near, True, f"bytes of a step, {r['streams']} streams at {r['depth']}")


def test_table():
    """Markdown in a pipe; in a terminal columns that stand below each other, as many as its window is wide."""
    needs("terminal")
    options = "-p 2 -n 2 -d 0,50 -b 1,2 -r 1".split()
    lines = infer("bench", TINY, *options).text.splitlines()
    same({line.count("|") for line in lines}, {10}, "cells of each row")
    same(set(lines[1]), set("|-:"), "the line below the header")
    for columns, most in ((40, "tok/s"), (80, "GB a step"), (100, "least-most")):
        with Terminal("bench", TINY, *options, columns=columns) as t:
            same(t.ended(), 0, "exit code")
        rows = t.text().split("\ntest")[1].splitlines()[1:]
        header = "test" + t.text().split("\ntest")[1].splitlines()[0]
        expect(most in header and len(header) <= columns, f"{columns} columns: {header!r}")
        same([len(row) for row in rows], [len(header)] * 5, f"lengths at {columns} columns")


def test_random_weights(folder):
    """A folder that has only a config.json is measured with random weights."""
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    for encoding in ([], *(["--encoding", name] for name in ("fp8", "gptq4", "nvfp4") if has("encodings"))):
        found = json.loads(infer("bench", folder, *"-p 2 -n 2 -d 0 -b 2 -r 1 -o json".split(), *encoding).text)
        same((found["random"], [r["kind"] for r in found["rows"]]), (True, ["prompt", "generate"]), f"rows of {encoding}")


def test_refuses(folder):
    for options, word in ((("-p", "0"), "from 1"), (("-b", "1,x"), "'1,x'"), (("-r", "3x"), "'3x'"),
                          (("-o", "xml"), "xml"), (("a", "b"), "too many")):
        refused("bench", TINY, *options, code=2, words=[word])
    for fields in ("{guided_json: {}}", "[1]", "5"):
        refused("bench", "--serve", "http://localhost:1", "--fields", fields, code=2, words=["--fields"])
    expect("left out" in infer("bench", TINY, *"-p 9999999 -b 1 -d 9999999".split(), code=4).err, "nothing fits")
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    refused("bench", TINY, "--encoding", "fp8", code=2, words=["has weights", "--encoding"])
    if not has("encodings"):
        refused("bench", folder, "--encoding", "fp8", code=2, words=["no encodings"])
        return
    refused("bench", folder, "--encoding", "fp9", code=2, words=["fp9", "FP8, INT8", "Q4_K"])
    refused("bench", folder, "--encoding", "q4_k", words=["blocks of 256", "Q4_K"])


class FakeServer:
    """A server of completions. answer(handler, request) writes one; `requests` are those that came, with their key."""

    def __init__(self, answer):
        self.requests = requests = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append({**request, "path": self.path, "key": self.headers["Authorization"]})
                answer(self, request)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def reply(body, status=200, kind="text/event-stream", length=None):
    """An answer of these bytes; length: what its header claims."""
    def answer(handler, _):
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", length or len(body))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = length is not None
    return answer


def event(text):
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def test_serve_counts():
    """Each client sends its requests one after another, with prompts of so many tokens that no other has."""
    pause, usage = 0.3 * slowness()[0], b'data: {"choices":[],"usage":{"completion_tokens":5000}}\n\ndata: [DONE]\n\n'

    def answer(handler, request):
        parts = [b": a heartbeat\n\n" + event(" a"), event(""), event(" b")[:9], event(" b")[9:], event(" c") + usage]
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Content-Length", sum(map(len, parts)))
        handler.end_headers()
        for part in parts:
            handler.wfile.write(part)
            time.sleep(pause if part == parts[1] else 0.02)

    with FakeServer(answer) as server:
        for key in None, "secret":
            server.requests.clear()
            begin = time.monotonic()
            rows = json.loads(infer("bench", "a-name", "--serve", server.url, *"-c 1,3 -p 5,9 -n 4 -r 2 -o json".split(),
                                    "--fields", '{"n": 1, "temperature": 0}',
                                    env={"OPENAI_API_KEY": key or ""}).text)
            most = time.monotonic() - begin
            same([(r["clients"], r["prompt"]) for r in rows], [(1, 5), (3, 5), (1, 9), (3, 9)])
            same([len(q["prompt"]) for q in server.requests], [5] * 9 + [9] * 8, "prompts, one to warm up")
            same([q["n"] for q in server.requests], [1] * 17, "--fields")
            same(len({str(q["prompt"]) for q in server.requests}), 17, "different prompts")
            for q in server.requests:
                same([q[k] for k in ("path", "model", "max_tokens", "temperature", "stream", "key")],
                     ["/v1/completions", "a-name", 4, 0, True, key and f"Bearer {key}"], "a request")
            for r in rows:
                least = 5000 * 2 * r["clients"] / most
                expect(least < r["tokens_per_second"] < 5000 * r["clients"] / pause, f"the usage counts: {r}")
                expect(r["token_p50"] <= r["token_p99"] <= r["token_most"], f"order of {r}")
                expect(r["first_p50"] <= r["first_p99"], f"order of {r}")
                expect(0.9 * pause * 1e3 < r["token_most"] < most * 1e3, f"the pause is seen: {r}")


def test_serve_refused():
    """What a server gets wrong is told in one line, without anything that a terminal would obey."""
    error = b'{"error":\n {"message": "over\x1b[31mloaded"}}'
    cases = (("an error", reply(error, 503, "application/json"), 1, ["status 503", "over?[31mloaded"]),
             ("no key", reply(error, 401, "application/json"), 5, ["status 401", "OPENAI_API_KEY"]),
             ("no stream", reply(b'{"choices":[{"text":" a"}]}', 200, "application/json"), 1, ["no text"]),
             ("no text", reply(event("")), 1, ["no text"]), ("nothing", reply(b""), 1, ["no text"]),
             ("cut off", reply(event(" a"), length=999), 5, ["/v1/completions: "]),
             ("bad events", reply(b"data: {\ndata:\ndata\n\0\ndata: [1]\ndata: " + b"[" * 10**5 + b"\ndata: "
                                  b'{"choices":[3],"usage":{"completion_tokens":-1e99}}\n\xff'), 1, ["no text"]))

    def check(_, answer, code, words):
        with FakeServer(answer) as server:
            refused("bench", "--serve", server.url, "-c", 1, "-r", 1, code=code, words=words)

    each(cases, check)
    refused("bench", "--serve", "http://127.0.0.1:1", code=5, words=["127.0.0.1:1"])
    refused("bench", "--serve", "http://127.0.0.1:1", "-c", "0", code=2, words=["clients"])
    for url in ("ftp://127.0.0.1:1", "nonsense://x", ""):
        refused("bench", "--serve", url, code=5, words=[f"{url}/v1/completions: "])

    served = []
    def second_fails(handler, request):
        served.append(request)
        reply(*((error, 500) if len(served) == 3 else (event(" a"),)))(handler, request)

    with FakeServer(second_fails) as server:
        refused("bench", "--serve", server.url, "-c", 1, "-r", 3, "-p", 8, words=["status 500"], code=1)
        same(len(served), 3, "requests")


def test_serve_at_a_long_url():
    path = "/" + "x" * 2000
    with FakeServer(reply(event(" a"))) as server:
        infer("bench", "--serve", server.url + path, *"-c 1 -r 1 -p 8".split())
        same({q["path"] for q in server.requests}, {path + "/v1/completions"}, "path of the requests")


def test_serve_itself():
    """The two commands understand each other."""
    needs("serve")
    with Server(TINY, "--ctx", 256, "--streams", 2) as server:
        rows = json.loads(infer("bench", "--serve", f"http://127.0.0.1:{server.port}",
                                *"-c 1,3 -p 70 -n 5 -r 1 -o json".split()).text)
        same([(r["clients"], r["prompt"]) for r in rows], [(1, 70), (3, 70)], "rows")
        same(server.metric("prompt_tokens_total"), 5 * 70, "tokens of prompts, one to warm up")
        same(server.metric("generated_tokens_total"), 5 * 5, "tokens, though some may end a text")
        same(server.metric("cached_tokens_total"), 0, "no prompt is like another")
