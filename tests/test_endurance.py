"""infer serve for a long time and in a bad moment: mixed requests whose clients leave, large bodies from all sides, and
SIGTERM in every state. SOAK=20000: as many requests, and 200 clients with large bodies."""
import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from helpers import PARROT, PLAIN, copy_model, each, expect, patience, same, until
from test_http import asked_bytes, peak
from test_serve import CHAT, HELLO, REQUEST, TEXT, Server, memory

NEEDS = ("serve",)  # rooms
SOAK = int(os.environ.get("SOAK") or 0)


def state(process):
    """Threads, descriptors, resident megabytes."""
    at = f"/proc/{process.pid}/"
    return len(os.listdir(at + "task")), len(os.listdir(at + "fd")), memory(process) / 1e6


def bodies(i):
    """Short requests of each kind, all different, some of them refused."""
    plain = {"max_tokens": 4, "seed": i, "temperature": 1}
    return [(TEXT, {**plain, "prompt": f"{i} + {i} ="}), (CHAT, {**plain, "messages": [{"role": "user", "content": f"Hello {i}!"}]}),
            (TEXT, {**plain, "prompt": f"{i}", "stream": True, "logprobs": 2, "stop": ["1"]}),
            (CHAT, {**plain, "messages": HELLO, "stream": True, "n": 2}), (TEXT, {**plain, "prompt": [i % 200], "max_tokens": -1}),
            (TEXT, {**plain, "prompt": [[1], [2]], "echo": True, "logprobs": 1}), ("/tokenize", {"messages": HELLO}),
            (CHAT, {**plain, "messages": HELLO, "unheard_of": i}), (TEXT, {**plain, "prompt": [1] * 5000}),
            (CHAT, {**plain, "messages": HELLO, "user": "x" * 100000}),
            (TEXT, {**plain, "prompt": [i % 200] * 600, "max_tokens": 2000, "ignore_eos": True, "stream": True})][i % 11]


def send(server, i):
    """A request; every third client leaves, before its request is there, before a reply or in it, one in two by a reset."""
    path, body = bodies(i)
    data = json.dumps(body).encode()
    rng, leaves = random.Random(i), i % 3 == 0 or i % 11 == 10
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience(120)) as s:
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
        whole = head + data
        part = leaves and i % 2
        s.sendall(whole[:rng.randrange(len(whole))] if part else whole)
        got, most = b"", 0 if part else rng.choice((0, 1, 200, 1000)) if leaves else 1 << 30
        while len(got) < most and (more := s.recv(min(1 << 16, most - len(got)))):
            got += more
        if leaves and rng.random() < 0.5:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if not leaves:
        expect(got.startswith(b"HTTP/1.1 "), f"{path} {data[:80]}: {got[:80]}")
        expect(int(got[9:12]) in (200, 400, 429), got[:300])


def test_soak():
    """Mixed requests with clients that leave: threads and descriptors are as at the start, memory as after a fifth."""
    n = SOAK or 600
    with Server(PARROT, "--streams", 8, "--ctx", 2048, "--cache", 2048, "--log", "off", program=PLAIN) as s:
        s.post(TEXT, {"prompt": [1], "max_tokens": 1})
        first = state(s.process)

        def some(numbers):
            with ThreadPoolExecutor(12) as pool:
                for done in [pool.submit(send, s, i) for i in numbers]:
                    done.result()
            s.wait(s.idle, "idle")
            s.wait(lambda: s.metric("connections") == 1, "closed")
            until(lambda: state(s.process)[:2] <= first[:2], "threads and descriptors as before")
            return state(s.process)
        warm = some(range(n // 5))
        last = some(range(n // 5, n))
        print(f"soak of {n}: threads, descriptors, MB: {first} at first, {warm} after a fifth, {last} at the end")
        expect(last[2] - warm[2] < 5 + n / 1000, f"{warm} after a fifth, {last} at the end")
        same(s.metric("cache_pages_used"), 0, "pages in use")
        same(s.ask("GET", "/health"), {"status": "ok"})


def test_large_bodies_from_all_sides(folder):
    """Each is 15 MB; together they stay below a gigabyte, each gets its turn, and others are answered meanwhile."""
    n = 15 << 20
    model = copy_model(PARROT, folder, {"max_position_embeddings": 1 << 24})
    kinds = [b'{"prompt":"%s"}' % (b"abc " * (n // 4)), b'{"prompt":"%s"}' % (b"a" * n),
             b'{"messages":[{"role":"user","content":"%s"}]}' % (b"abc " * (n // 4)),
             json.dumps({"messages": [{"role": "user", "content": ""}] * 350000}).encode(), b'{"prompt":[%s1]}' % (b"1," * (n // 2))]
    clients, seen = 200 if SOAK else 6, []
    with Server(model, "--ctx", 1 << 20, "--cache", 1 << 20, "--log", "off", program=PLAIN) as s:
        idle = memory(s.process) / 1e6

        def large(i):
            try:
                seen.append(asked_bytes(s, CHAT if b"messages" in kinds[i % 5][:20] else TEXT, kinds[i % 5])[0])
            except (ConnectionError, TimeoutError) as e:
                seen.append(type(e).__name__)
        threads = [threading.Thread(target=large, args=(i,)) for i in range(clients)]
        for t in threads:
            t.start()
        slowest = 0
        while any(t.is_alive() for t in threads):
            began = time.monotonic()
            same(s.ask("GET", "/health"), {"status": "ok"})
            s.post(TEXT, {"prompt": [1], "max_tokens": 1})
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.2)
        most = peak(s.process) / 1e6
        s.wait(lambda: memory(s.process) / 1e6 < idle + 60, "memory given back")
        print(f"{clients} bodies of 15 MB: {idle:.0f} MB before, {most:.0f} MB at most, {memory(s.process) / 1e6:.0f} MB after; "
              f"{ {x: seen.count(x) for x in set(seen)} }; the slowest small request {slowest:.1f} s")
        expect(most < 1000, f"{most:.0f} MB")
        expect(set(seen) <= {400, 413, 503}, set(seen))
        expect(seen.count(503) <= clients // 20, "they did not get their turn")  # which takes ten minutes at most


# ---- SIGTERM in each state

def connect(server, data=b""):
    s = socket.create_connection(("127.0.0.1", server.port), timeout=patience(60))
    s.sendall(data)
    return s


def request(path, body, *headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Length: %d" % len(data), *headers,
                         b"", data])


LONG = {"prompt": [1] * 300, "max_tokens": 3500, "ignore_eos": True}
PROMPT = {"prompt": [1] * 4000, "max_tokens": 1}
BODY = b'{"prompt":"%s"}' % (b"a" * (15 << 20))
RUNNING = {  # what clients have sent when the signal comes
    "nothing": [], "a connection": [b""], "half a line": [b"POST /v1/com"], "half the headers": [REQUEST],
    "half a body": [REQUEST + b"Content-Length: 5000\r\n\r\n{"], "half a large body": [request(TEXT, BODY)[:1 << 21]],
    "half a chunk": [REQUEST + b"Transfer-Encoding: chunked\r\n\r\n500\r\n{"],
    "no body yet": [REQUEST + b"Content-Length: 50\r\nExpect: 100-continue\r\n\r\n"],
    "a large body": [request(TEXT, BODY)], "many large bodies": [request(TEXT, BODY)] * 6,
    "more large bodies than may come": [request(TEXT, BODY)[:1 << 21]] * 6,
    "a large body to tokenize": [request("/tokenize", BODY)],
    "many messages": [request(CHAT, {"messages": HELLO * 200000})],
    "a long prompt": [request(TEXT, PROMPT)], "an answer": [request(TEXT, LONG)],
    "a stream": [request(TEXT, {**LONG, "stream": True})], "many answers": [request(TEXT, {**LONG, "n": 8})],
    "a full queue": [request(TEXT, LONG)] * 6, "a queue of streams": [request(TEXT, {**LONG, "stream": True})] * 4,
    "logprobs": [request(TEXT, {**LONG, "logprobs": 20, "echo": True})],
    "a reply that is not read": [request("/tokenize", {"prompt": "x " * (1 << 20)})],
    "kept connections": [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 3,
    "several requests at once": [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50 + request(TEXT, LONG)]}


def test_sigterm_in_every_state(folder):
    """It ends within --drain, with the exit code 0."""
    model, drain = copy_model(PARROT, folder, {"max_position_embeddings": 1 << 24}), 1
    took = {}

    def check(name, sent, leave, pause):
        with Server(model, "--streams", 2, "--queue", 4, "--ctx", 1 << 20, "--cache", 1 << 20, "--drain", drain,
                    program=PLAIN) as s:
            def write(client, data):
                try:
                    client.sendall(data)
                except OSError:
                    pass
            clients = [connect(s) for _ in sent]
            writers = [threading.Thread(target=write, args=pair) for pair in zip(clients, sent)]
            for w in writers:
                w.start()
            time.sleep(pause)
            for client in clients if leave else []:
                client.close()
            began = time.monotonic()
            s.process.send_signal(signal.SIGTERM)
            same(s.process.wait(patience(30)), 0, "exit code")
            took[name] = time.monotonic() - began
            expect(took[name] < patience(drain) / 5 + 2, f"{took[name]:.1f} s")
            for w in writers:
                w.join()
            for client in clients:
                client.close()
    states = [(name, sent, False, 0.3) for name, sent in RUNNING.items()]
    states += [(f"{name}, left", RUNNING[name], True, 0.1) for name in ("a long prompt", "a stream", "a large body")]
    with ThreadPoolExecutor(3) as pool:  # most of their time is --drain's
        each([(state[0], pool.submit(check, *state)) for state in states], lambda name, checked: checked.result())
    slowest = max(took, key=took.get)
    print(f"SIGTERM in {len(took)} states: the slowest is {slowest}, {took[slowest]:.1f} s, with --drain {drain}")
