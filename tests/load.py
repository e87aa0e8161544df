"""A server under load: memory over many short requests, and clients that leave in the middle of an answer. By hand: it
takes minutes, with sanitizers (--program build/asan/infer-reference) an hour.

    python3 tests/load.py [--program ./infer-reference] [--model models/tiny] [--requests 10000] [--leaving 200]

Prints resident memory, GPU memory where there is a GPU, and how long departed clients keep their room. Fails if memory
grows by more than 1 KB a request (fewer than 5,000 of them, as fit for sanitizers, do not tell), if room is not free a
quarter of a second after the next step, or if the server ends with a report of its sanitizers.
"""
import argparse
import http.client
import json
import subprocess
import threading
import time
from pathlib import Path

from helpers import PLAIN, TESTS, expect
from test_serve import CHAT, HELLO, TEXT, Server

THREADS, ENOUGH = 16, 5000
WARM = 0.2  # of all requests, until every pool and cache has its size


def resident(process):
    """Bytes."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the server has ended")


def gpu_memory():
    """MiB of all GPUs, or None."""
    try:
        p = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], check=True,
                           capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(map(int, p.stdout.split()))


def bodies(i):
    """Short requests of each kind, all different, some of them refused."""
    plain = {"max_tokens": 4, "seed": i, "temperature": 1}
    return [(TEXT, {**plain, "prompt": f"{i} + {i} ="}, 200),
            (CHAT, {**plain, "messages": [{"role": "user", "content": f"Hello {i}!"}]}, 200),
            (TEXT, {**plain, "prompt": f"{i}", "stream": True, "logprobs": 2, "stop": ["1"]}, 200),
            (CHAT, {**plain, "messages": HELLO, "stream": True, "n": 2}, 200),
            (TEXT, {**plain, "prompt": [i], "max_tokens": -1}, 400)][i % 5]


def check_memory(server, requests):
    lock, numbers, seen = threading.Lock(), iter(range(requests)), []
    failures, gpu = [], None

    def work():
        nonlocal gpu
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        while True:
            with lock:
                i = next(numbers, None)
                if i is None or failures:
                    break
                if i % max(requests // 20, 1) == 0 and i >= WARM * requests:
                    gpu = gpu or gpu_memory()
                    seen.append((i, resident(server.process)))
                    print(f"{i:6} requests {seen[-1][1] / 1e6:8.2f} MB resident", flush=True)
            path, body, code = bodies(i)
            try:
                connection.request("POST", path, json.dumps(body))
                response = connection.getresponse()
                text = response.read()
                expect(response.status == code, f"request {i}: status {response.status}: {text[:200]}")
            except (OSError, http.client.HTTPException, AssertionError) as e:
                failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expect(not failures, failures[:1])
    n, x, y = len(seen), [a for a, _ in seen], [b for _, b in seen]
    slope = (n * sum(a * b for a, b in seen) - sum(x) * sum(y)) / (n * sum(a * a for a in x) - sum(x) ** 2)
    print(f"{slope:.0f} bytes a request")
    expect(slope <= 1024 or requests < ENOUGH, "memory grows")
    expect(gpu_memory() == gpu, f"GPU memory: {gpu} MiB, then {gpu_memory()}")


def check_leaving(server, leaving):
    """The longest pause between two tokens while all are there says how long a step takes."""
    endless = {"max_tokens": 1000, "ignore_eos": True, "temperature": 1}
    streams = [server.open_stream(TEXT, {**endless, "prompt": f"Client {i}: "}) for i in range(leaving)]
    for s in streams:
        begun = b""
        while b"data:" not in begun:
            more = s.recv(1 << 16)
            expect(more and b" 200 " in begun + more, f"no answer begins: {begun + more}")
            begun += more
    last, step = time.monotonic(), 0.0
    for _ in range(8):
        streams[0].recv(1 << 16)
        step, last = max(step, time.monotonic() - last), time.monotonic()
    for s in streams:
        s.close()
    left = time.monotonic()
    server.wait(server.idle, "idle", 60)
    took = time.monotonic() - left
    print(f"{leaving} clients left: their room is free after {took * 1e3:.0f} ms, a step takes {step * 1e3:.0f} ms")
    expect(took < 0.25 + 2 * step, "room is not free in time")  # the step that runs, and the next


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", type=Path, default=PLAIN)
    parser.add_argument("--model", type=Path, default=TESTS.parent / "models" / "tiny")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--leaving", type=int, default=200)
    args = parser.parse_args()
    # a small cache, which is soon full, so that pages are taken from others
    limits = "--streams", 256, "--ctx", 2048, "--cache", 65536
    with Server(args.model, *limits, program=args.program.absolute()) as server:
        check_leaving(server, args.leaving)
        check_memory(server, args.requests)
        check_leaving(server, args.leaving)


if __name__ == "__main__":
    main()
