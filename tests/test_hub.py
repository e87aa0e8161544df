"""Downloads from a fake hub: that they arrive, whatever the hub, the network, the disk and other processes do, and that
the token goes nowhere else. RUNS=N sets how often the process is killed (20), STEP=N the bytes between two resets (16).
"""
import email.utils
import fcntl
import gzip
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time

from fake_hub import FakeHub, File
from helpers import (CHECKED, HOME, PARROT, PLAIN, Skip, Terminal, check_sanitizers, copy_model, each, environment,
                     expect, has, infer, needs, patience, read_json, read_safetensors, refused, safetensors, same, start, until)

TOKEN = "hf_TheSecretOfTheTests"
BEGUN = (32 << 20) + 12345  # bytes of a large file that an earlier download left
SMALL = {p.name: p.read_bytes() for p in sorted(PARROT.iterdir()) if p.name != "conversations.json"}
WEIGHTS = "model.safetensors"
NOISE = random.Random(0).randbytes(1 << 20)
ASK = ("play", "org/model", "-p", "hello", "--temperature", "0", "--max-tokens", "200")


def big_file():
    """The path of a file of 70 MB without equal blocks."""
    path = HOME / "big.safetensors"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
        with made.open("wb") as f:
            for i in range(67):
                f.write(i.to_bytes(8, "little") + NOISE[8:])
        made.rename(path)
    return path


def env_of(hub, folder, **more):
    return {"HF_ENDPOINT": hub.url, "HF_HOME": folder / "hf", "HOME": folder, **more}


def fetch(hub, folder, *args, at="", env=None, **how):
    how.setdefault("seconds", 120)
    return infer("download", hub.repository + at, *args, env=env_of(hub, folder, **(env or {})), **how)


def refuses(hub, folder, *args, code=5, words=(), env=None, **how):
    """The download ends with this code and, in its last line, these words."""
    r = fetch(hub, folder, *args, code=code, env=env, **how)
    same(r.out, b"", "stdout")
    last = r.err.splitlines()[-1]
    expect(last.startswith("infer: ") and last.isprintable(), f"not a line from infer: {last!r}")
    missing = [w for w in words if w not in last]
    expect(not missing, f"the message lacks {missing}: {last!r}")
    return r


def cache_of(hub, folder):
    return folder / "hf" / "hub" / ("models--" + hub.repository.replace("/", "--"))


def check_whole(hub, folder, names=None, leftovers=False):
    """Every file is there under its name with the right bytes, and nothing else is there."""
    cache = cache_of(hub, folder)
    names = sorted(hub.files if names is None else names)
    snapshot = cache / "snapshots" / hub.commit
    same(sorted(str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if not p.is_dir()), names, "files")
    for name in names:
        file = hub.files[name]
        expect((snapshot / name).read_bytes() == file.bytes(), f"{name} has other bytes")
        up = "../" * (2 + name.count("/"))
        same(os.readlink(snapshot / name), f"{up}blobs/{file.id}", "link")
    if not leftovers:
        same(sorted(p.name for p in (cache / "blobs").iterdir()), sorted({hub.files[n].id for n in names}), "blobs")


def check_sent(hub, size):
    """The large file's bytes were sent once, but for a few: a busy machine may have lost a connection."""
    sent = hub.sent["big.safetensors"]
    expect(size <= sent < size + (8 << 20), f"{sent} bytes were sent for {size}")


# ---- what a download does

def test_download(folder):
    with FakeHub(SMALL) as hub:
        r = fetch(hub, folder)
        check_whole(hub, folder)
        cache = cache_of(hub, folder)
        snapshot = cache / "snapshots" / hub.commit
        same(r.text, f"{snapshot}\n", "stdout")
        expect("\x1b" not in r.err and "✓ config.json" in r.err, f"no plain lines: {r.err!r}")
        same((cache / "refs" / "main").read_text(), hub.commit, "refs/main")
        same({q.headers["Accept-Encoding"] for q in hub.requests}, {"identity"}, "Accept-Encoding")
        same(r.err.splitlines()[-1], "infer play org/model  talks to it", "the last line")
        hub.clear()
        fetch(hub, folder)
        same(hub.asked(), 1, "requests when all is here")
        hub.clear()
        same(fetch(hub, folder, at="@" + hub.commit).text, r.text, "by commit")
        same(fetch(hub, folder, env={"HF_HUB_OFFLINE": 1}).text, r.text, "offline")
        same(hub.asked(), 0, "requests for what cannot change")
        hub.fault = lambda q: q.reply(429, {"Retry-After": 60})
        limited = fetch(hub, folder)
        same(limited.text, r.text, "while the rate is limited")
        expect("infer uses them" in limited.err, limited.err)
        infer("tokenize", "org/model", stdin="hello", env=env_of(hub, folder))
    with socket.socket() as held:  # no other test's server gets the hub's port; whoever connects is refused
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", int(hub.url.rsplit(":", 1)[1])))
        alone = fetch(hub, folder)
        same(alone.text, r.text, "with no hub at all")
        expect("goes on" not in alone.err, f"there is nothing to go on with: {alone.err}")
        refuses(hub, folder, at="@other", words=["network"])
    refuses(hub, folder, at="@other", env={"HF_HUB_OFFLINE": 1}, words=["HF_HUB_OFFLINE"])


MANY = {**SMALL, "model-00001-of-00002.safetensors": b"a" * 9, "model.safetensors.index.json": b"{}",
        "vocab.json": b"{}", "quantize_config.json": b"{}", "merges.txt": b"", "chat_template.jinja": b"x",
        "pytorch_model.bin": b"b" * 5000, "original/model.safetensors": b"c" * 7000, "metal/deep/model.bin": b"d",
        "README.md": b"e", "consolidated.safetensors": b"f"}  # the same weights again
READ = {*MANY} - {"pytorch_model.bin", "original/model.safetensors", "metal/deep/model.bin", "README.md",
                  "consolidated.safetensors"}
SELECTIONS = [
    ("default", [], READ),
    ("all", ["--all"], {*MANY}),
    ("all but", ["--all", "--exclude", "*.bin", "--exclude", "original/*"],
     {*MANY} - {"pytorch_model.bin", "original/model.safetensors", "metal/deep/model.bin"}),
    ("some", ["--include", "*.md", "--include", "original/*"], {"README.md", "original/model.safetensors"}),
    ("default but", ["--exclude", "*.safetensors"], {n for n in READ if not n.endswith(".safetensors")}),
]


def test_selection(folder):
    def check(name, args, names):
        home = folder / name
        hub.clear()
        r = fetch(hub, home, *args)
        expect(f"{len(names)} files" in r.err.splitlines()[0], r.err)
        check_whole(hub, home, names)
    with FakeHub(MANY) as hub:
        each(SELECTIONS, check)
        refuses(hub, folder, "--include", "*.zip", code=3, words=["--include"])
        for wanted, code in (["README.md"], 0), (["README.md", "vocab.json"], 5), (["*.md"], 5):
            named = [word for name in wanted for word in ("--include", name)]
            fetch(hub, folder / "some", *named, env={"HF_HUB_OFFLINE": 1}, code=code)
    with FakeHub({"README.md": b"x"}) as hub:
        refuses(hub, folder, code=3, words=["safetensors", "--all"])
    with FakeHub({}) as hub:
        refuses(hub, folder, "--all", code=3, words=["none of its 0 files"])


def test_closed_output(folder):
    """No file gets the number of a closed stdout or stderr, and with it what was meant for the user."""
    with FakeHub({"big.safetensors": big_file(), **SMALL}) as hub:
        for closed, code in (("2>&-", 0), (">&-", 1), (">&- 2>&-", 1)):
            infer("-c", f'exec "$0" "$@" {closed}', CHECKED, "download", "org/model", program="/bin/sh", code=code,
                  env=env_of(hub, folder / closed))
            check_whole(hub, folder / closed)


def test_names(folder):
    """Names that a URL, a shell or a pattern could take for something else; empty files."""
    names = ["a b", "50%25 off", "%2e%2e", "é 日本", "😀", "a+b&c=d#e?f", "q'\"$(x)", "[a]*", "-x", ".hidden", "a@b",
             "..."]
    files = {f"{name}.safetensors": (b"x" * i) * 1000 for i, name in enumerate(names)}
    with FakeHub({**SMALL, **files, "sub dir/ü%.md": b"", "large": File(b"", large=True)}) as hub:
        fetch(hub, folder, "--all")
        check_whole(hub, folder)


def test_arguments(folder):
    with FakeHub({**SMALL, "sub/x.md": b"x"}) as hub:
        hub.revisions |= {"refs/pr/1", "v1.0"}
        commit = hub.commit
        accepted = [("org/model", "main"), ("org/model@main", "main"), ("org/model@" + commit, None),
                    ("org/model@refs/pr/1", "refs/pr/1"), ("org/model@v1.0", "v1.0")]
        pasted = [("https://huggingface.co/org/model", "main"), ("hf.co/org/model/", "main"),
                  (hub.url + "/org/model", "main"), ("https://huggingface.co/org/model/tree/v1.0", "v1.0"),
                  ("https://huggingface.co/org/model/blob/main/config.json?download=true", "main"),
                  ("https://huggingface.co/org/model/tree/refs%2Fpr%2F1", "refs/pr/1"),
                  ("https://huggingface.co/org/model/discussions/7", "main")]
        accepted += pasted * has("terminal")
        for i, (argument, ref) in enumerate(accepted):
            home = folder / str(i)
            infer("download", argument, env=env_of(hub, home))
            check_whole(hub, home, SMALL)
            refs = cache_of(hub, home) / "refs"
            same([str(p.relative_to(refs)) for p in refs.rglob("*") if p.is_file()], [ref] if ref else [], "refs")
        for argument in ("", "../x", "org/..", "a/b/c", "org/mo--del", "/etc", "-x/y", "org/", "/model", "org/mo del",
                         "org/model@../../x", "org/model@", "https://example.com/org/model", "https://huggingface.co/org", "org/m\x1b",
                         "o" * 3000):
            refused("download", "--", argument, code=2, env=env_of(hub, folder))
        r = refuses(hub, folder, at="@" + commit[:7], code=3, words=["40 digits"])
        expect("TOKEN" not in r.err, f"a token does not help: {r.err}")
        for args in (["--jobs", "0"], ["--jobs", "x"], ["--jobs", "4x"], ["--nothing"],
                     ["--token-file", "/nowhere"]):
            expect(fetch(hub, folder, *args, code=2).err, "no message")
        for endpoint in ("ftp://x", "file:///etc", "nothing", "http://", hub.url.replace("//", "//user:password@")):
            r = refused("download", "org/model", code=2, env=env_of(hub, folder, HF_ENDPOINT=endpoint),
                        words=["HF_ENDPOINT"])
            expect("password@" not in r.err, r.err)


# ---- what can go wrong with the hub

def once(answer):
    """A fault that happens to the first request for each file's content."""
    seen = set()

    def fault(q):
        if q.host == "content" and q.name not in seen:
            seen.add(q.name)
            return answer(q)
        return None
    return fault


def content(answer):
    return lambda q: answer(q) if q.host == "content" else None


def resolve(answer):
    return lambda q: answer(q) if q.host == "hub" and "/resolve/" in q.path else None


def api(answer):
    return lambda q: answer(q) if q.path.startswith("/api/") else None


def change(**values):
    """Goes on with the request after a change of these fields."""
    return lambda q: q.__dict__.update(values)


def in_listing(name=WEIGHTS, **fields):
    return lambda hub: hub.listed.update({name: fields})


def lfs(**fields):
    file = File(SMALL[WEIGHTS])
    return in_listing(lfs={"sha256": file.id, "size": file.size, **fields})


def when(fault):
    def prepare(hub):
        hub.fault = fault
    return prepare


def endless(q, status):
    q.reply(status, {"Content-Length": None, "Connection": "close"})
    while True:  # until the client goes
        q.wfile.write(NOISE)


def http_date(seconds):
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


FINE = None
GZIP, ZIPPED = {"Content-Encoding": "gzip"}, gzip.compress(b"[{}]") + b"some more bytes"
FAULTS = [  # what goes wrong, how, exit code or FINE if the download must survive it, words of the message
    ("redirect to a file", when(content(lambda q: q.redirect("file:///etc/passwd"))), 5,
     ["redirects lead to https only", '"file"']),
    ("redirect to ftp", when(resolve(lambda q: q.redirect("ftp://127.0.0.1/x"))), 5, ["redirect", '"ftp"']),
    ("redirect to nowhere", when(content(lambda q: q.reply(302))), 5, ["302"]),
    ("redirect to rubbish", when(content(lambda q: q.redirect("http://[x"))), 5, ["redirect"]),
    ("redirects in a circle", when(content(lambda q: q.redirect(q.path))), 5, ["(10) redirects"]),
    ("401 for the content", when(content(lambda q: q.reply(401))), 5, ["401"]),
    ("403 for the content", when(content(lambda q: q.reply(403))), 5, ["403"]),
    ("404 for the content", when(content(lambda q: q.reply(404))), 5, ["404"]),
    ("404 for a file", when(resolve(lambda q: q.error(404, "EntryNotFound"))), 3, ["lacks a file"]),
    ("401 without a code", when(api(lambda q: q.reply(401))), 5, ["token", "/settings/tokens"]),
    ("403 without a code", when(api(lambda q: q.reply(403))), 5, ["denies", "/org/model"]),
    ("404 without a code", when(api(lambda q: q.reply(404))), 3, ["/org/model"]),
    ("RepoNotFound", when(api(lambda q: q.error(401, "RepoNotFound"))), 3, ["private", "HF_TOKEN", "/org/model"]),
    ("RepoNotFound as 404", when(api(lambda q: q.error(404, "RepoNotFound"))), 3, ["private", "/org/model"]),
    ("RevisionNotFound", when(api(lambda q: q.error(404, "RevisionNotFound"))), 3,
     ["(main)", "40 digits", "/org/model"]),
    ("GatedRepo", when(resolve(lambda q: q.error(401, "GatedRepo"))), 5, ["licence", "/org/model", "HF_TOKEN"]),
    ("GatedRepo as 403", when(resolve(lambda q: q.error(403, "GatedRepo"))), 5, ["licence", "/org/model"]),
    ("DisabledRepo", when(api(lambda q: q.error(403, "DisabledRepo"))), 5, ["disabled"]),
    ("418", when(api(lambda q: q.reply(418))), 5, ["418"]),
    ("416", when(content(lambda q: q.reply(416))), 5, ["416"]),
    ("408 once", when(once(lambda q: q.reply(408))), FINE, []),
    ("429 with 2 seconds", when(once(lambda q: q.reply(429, {"Retry-After": 2}))), FINE, ["limits the rate"]),
    ("429 with a date", when(once(lambda q: q.reply(429, {"Retry-After": http_date(3)}))), FINE, []),
    ("429 with a past date", when(once(lambda q: q.reply(429, {"Retry-After": http_date(-9)}))), FINE, []),
    ("429 with 10^9", when(content(lambda q: q.reply(429, {"Retry-After": 10 ** 9}))), 5, ["limits the rate"]),
    ("429 with rubbish", when(once(lambda q: q.reply(429, {"Retry-After": "soon"}))), FINE, []),
    ("429 at the list", when(api(lambda q: q.reply(429, {"Retry-After": 4000}))), 5, ["limits the rate", "token"]),
    ("500 once", when(once(lambda q: q.reply(500))), FINE, []),
    ("503 for ever", when(content(lambda q: q.reply(503))), 5, ["503"]),
    ("no HTTP", when(content(lambda q: q.wfile.write(b"x" * 1000) and q.reset())), 5, ["HTTP/0.9"]),
    ("reset at once, for ever", when(content(lambda q: q.reset())), 5, ["network", "the same command goes on"]),
    ("a stall before the answer", when(once(lambda q: q.stall())), FINE, []),
    ("a stall for ever", when(content(lambda q: q.stall())), 5, ["network"]),
    ("an answer that ends early", when(once(change(only=5000))), FINE, []),
    ("an error without an end", when(content(lambda q: endless(q, 404))), 5, ["404"]),
    ("etag ../../x", when(resolve(change(extra={"X-Linked-ETag": '"../../x"'}))), FINE, []),
    ("etag of another file", when(resolve(change(extra={"X-Linked-ETag": f'"{"a" * 64}"'}))), FINE, []),
    ("no etag", when(resolve(change(extra={"X-Linked-ETag": None}))), FINE, []),
    ("plain ETag ../../x", when(resolve(change(extra={"ETag": '"../../x"', "X-Linked-ETag": None}))), FINE, []),
    ("commit ../x in a header", when(resolve(change(extra={"X-Repo-Commit": "../x"}))), FINE, []),
    ("another commit in a header", when(resolve(change(extra={"X-Repo-Commit": "b" * 40}))), FINE, []),
    ("no commit in a header", when(resolve(change(extra={"X-Repo-Commit": None}))), FINE, []),
    ("commit ../x", when(api(lambda q: q.reply(200, body={"sha": "../x", "id": "org/model"}))), 3, ["commit", "../x"]),
    ("commit of 39 digits", when(api(lambda q: q.reply(200, body={"sha": "a" * 39}))), 3, ["commit"]),
    ("commit in capitals", when(api(lambda q: q.reply(200, body={"sha": "A" * 40}))), 3, ["commit"]),
    ("no commit", when(api(lambda q: q.reply(200, body={}))), 3, ["commit"]),
    ("X-Linked-Size missing", when(resolve(change(extra={"X-Linked-Size": None}))), FINE, []),
    ("X-Linked-Size wrong", when(resolve(change(extra={"X-Linked-Size": 7}))), FINE, []),
    ("X-Linked-Size negative", when(resolve(change(extra={"X-Linked-Size": -7}))), FINE, []),
    ("a bit flipped once", when(once(change(flip=700000))), FINE, []),
    ("a bit flipped always", when(content(change(flip=700000))), 5, [WEIGHTS, "twice"]),
    ("more bytes than asked", when(content(lambda q: q.reply(200, body=b"x" * 10 ** 6))), 5, ["more than"]),
    ("fewer bytes than asked", when(content(lambda q: q.reply(200, body=b"x" * 10 ** 4))), 5, ["network"]),
    ("the signature expires", when(once(lambda q: q.reply(403))), FINE, []),
    ("gzip with bytes behind it", when(content(lambda q: q.reply(200, GZIP, ZIPPED))), 5, ["the same command goes on"]),
    ("gzip with bytes behind it, in the list", when(api(lambda q: q.reply(200, GZIP, ZIPPED))), 5, ["127.0.0.1"]),
    ("the list is no JSON", when(api(lambda q: q.reply(200, body=b"[{"))), 5, ["JSON"]),
    ("the list is null", when(api(lambda q: q.reply(200, body=b"null"))), 5, ["JSON"]),
    ("the list is no list", when(api(lambda q: q.reply(200, body={"sha": "a" * 40, "siblings": {}}))), 3, ["list"]),
    ("a login page instead of the list", when(api(lambda q: q.reply(200, body=b"<!DOCTYPE html><p>Hotel"))), 5,
     ["web page", "log in"]),
    ("a login page instead of a file", when(content(lambda q: q.reply(200, body=b"<html><p>Hotel"))), 3,
     ["a web page (HTML) in its place", "/org/model"]),
    ("name a/../../x", in_listing(rfilename="a/../../x"), 3, ["a/../../x", "refused"]),
    ("name ../x", in_listing(rfilename="../x"), 3, ["../x", "refused"]),
    ("name ..", in_listing(rfilename=".."), 3, ["refused"]),
    ("name /x", in_listing(rfilename="/x"), 3, ["refused"]),
    ("name a\\..\\b", in_listing(rfilename="a\\..\\b"), 3, ["refused"]),
    ("name a//b", in_listing(rfilename="a//b"), 3, ["refused"]),
    ("name ./a", in_listing(rfilename="./a"), 3, ["refused"]),
    ("name with a line feed", in_listing(rfilename="a\nb.safetensors"), 3, ["refused"]),
    ("name with an escape", in_listing(rfilename="\x1b[2J.safetensors"), 3, ["refused"]),
    ("name with an escape of one character", in_listing(rfilename="\x9b2J.safetensors"), 3, ["refused"]),
    ("name of 300 letters", in_listing(rfilename="a" * 300 + ".safetensors"), 3, ["refused"]),
    ("no name", in_listing(rfilename=None), 3, ["refused"]),
    ("sha256 ../../x", lfs(sha256="../../x"), 3, [WEIGHTS, "hash"]),
    ("sha256 of 63 digits", lfs(sha256="a" * 63), 3, [WEIGHTS]),
    ("sha256 of 40 digits", lfs(sha256="a" * 40), 3, [WEIGHTS]),
    ("git hash ../x", in_listing("config.json", blobId="../x"), 3, ["config.json"]),
    ("size -1", lfs(size=-1), 3, [WEIGHTS, "size"]),
    ("size 1.5", lfs(size=1.5), 3, [WEIGHTS, "size"]),
    ("size 2^60", lfs(size=2 ** 60), 3, [WEIGHTS, "size"]),
    ("size 10^15", lfs(size=10 ** 15), 4, ["needs 1000 TB more"]),
    ("size one less", lfs(size=len(SMALL[WEIGHTS]) - 1), 5, []),
    ("size one more", lfs(size=len(SMALL[WEIGHTS]) + 1), 5, []),
    ("another sha256", lfs(sha256="c" * 64), 5, []),
]


def test_faults(folder):
    """Each fault ends in one line or is survived; in either case nothing wrong is kept, and what is there suffices when
    the fault has gone."""
    def check(name, prepare, code, words):
        home = folder / str(len(list(folder.iterdir())))
        home.mkdir()
        with FakeHub(SMALL, token=None) as hub:
            prepare(hub)
            env = {"HF_HUB_DOWNLOAD_TIMEOUT": 1} if "stall" in name else {}
            if code is FINE:
                r = fetch(hub, home, env=env, seconds=40)
                expect(all(w in r.err for w in words), f"lacks {words}: {r.err!r}")
            else:
                r = refuses(hub, home, code=code, words=words, env=env, seconds=40)
                expect(not (home / "hf/hub/models--org--model/refs").exists(), "the revision was published")
                same(sorted(p.name for p in home.iterdir() if p.name != "hf"), [], "outside the cache")
            hub.fault, hub.listed = None, {}
            fetch(hub, home)
            check_whole(hub, home, leftovers="another sha256" in name)
    each(FAULTS, check)


def test_renamed_and_many_files(folder):
    files = {**SMALL, **{f"many-{i}.safetensors": NOISE[i:i + i] for i in range(120)}}
    with FakeHub(files, repository="org/new") as hub:
        hub.names.add("org/model")
        infer("download", "org/model", env=env_of(hub, folder))
        hub.repository = "org/model"  # it lies under the name that was asked for, as other tools do it
        check_whole(hub, folder)


def test_resume(folder):
    """What has arrived is not fetched again; what other tools began is continued; what is wrong is fetched anew."""
    with FakeHub({**SMALL, "big.safetensors": big_file()}) as hub:
        big = hub.files["big.safetensors"]
        blob = cache_of(hub, folder) / "blobs" / big.id
        partial = blob.with_name(f"{big.id}.incomplete")
        hub.fault = content(lambda q: q.reply(404) if q.name == "big.safetensors" and hub.sent.get(q.name, 0) > 40 << 20
                            else q.__dict__.update(only=9 << 20))
        refuses(hub, folder, words=["404", " of 71.1 MB are here"])
        there = partial.stat().st_size
        expect(there > 9 << 20, f"only {there} bytes were kept")
        expect(partial.read_bytes() == big.bytes()[:there], "it is not the beginning")
        hub.fault = None
        hub.clear()
        fetch(hub, folder)
        check_whole(hub, folder)
        check_sent(hub, big.size - there)
        hub.clear()
        cases = [("a beginning", big.bytes()[:BEGUN], None),
                 ("wrong bytes", bytes(1 << 20), None), ("all there, all wrong", bytes(big.size), None),
                 ("all there", big.bytes(), None), ("more than all", big.bytes() + b"x", None),
                 ("much more, and wrong", bytes(big.size + (1 << 20)), None), ("nothing", b"", None),
                 ("200 to a range", big.bytes()[:BEGUN], change(ignore_range=True)),
                 ("206 from elsewhere", big.bytes()[:BEGUN], change(wrong_start=1)),
                 ("206 of another size", big.bytes()[:BEGUN], change(extra={"Content-Range": f"bytes {BEGUN}-9/10"})),
                 ("206 without Content-Range", big.bytes()[:BEGUN], change(extra={"Content-Range": None}))]

        def check(name, content_there, answer):
            blob.unlink()
            partial.write_bytes(content_there)
            hub.fault = content(answer) if answer else None
            hub.clear()
            fetch(hub, folder, program=PLAIN)
            check_whole(hub, folder)
            if name.startswith(("a beg", "all there", "more")) and "wrong" not in name:
                sent = hub.sent.get("big.safetensors", 0)
                expect(big.size - len(content_there) <= sent + 1 < big.size - len(content_there) + (8 << 20) + 2,
                       f"{sent} bytes were sent")
        each(cases, check)
        blob.unlink()
        hub.fault = content(change(ignore_range=True, only=1 << 20))  # it never gets further
        refuses(hub, folder, words=["the same command goes on"])
        hub.fault = None
        blob.write_bytes(b"too short")  # under its final name
        fetch(hub, folder)
        check_whole(hub, folder)


def test_reset_at_every_byte(folder):
    """The connection breaks again and again, so that over the run it breaks at every STEPth byte of 64 KiB."""
    with FakeHub({"model.safetensors": NOISE[:1 << 16]}) as hub:
        hub.fault = content(change(only=int(os.environ.get("STEP", 16))))
        fetch(hub, folder, seconds=600)
        check_whole(hub, folder)
        same(hub.sent["model.safetensors"], 1 << 16, "bytes sent")


def test_kill(folder):
    """kill -9 at random moments: the next run ends with the right bytes, and fetches few of them again."""
    again, killed, runs = [], 0, int(os.environ.get("RUNS", 20))
    with FakeHub({**SMALL, "big.safetensors": big_file()}) as hub:
        hub.rate = 60e6
        for i in range(runs):
            home = folder / str(i)
            hub.clear()
            for _ in range(random.randint(1, 3)):
                p = start("download", "org/model", program=PLAIN, env=env_of(hub, home), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)
                try:
                    p.communicate(timeout=random.uniform(0, 0.5))
                except subprocess.TimeoutExpired:
                    p.kill()
                    p.communicate()
                    killed += 1
            fetch(hub, home, program=PLAIN)
            check_whole(hub, home)
            again.append(hub.sent["big.safetensors"] - hub.files["big.safetensors"].size)
            shutil.rmtree(home)
    expect(killed > runs / 2, f"only {killed} of {runs} runs were killed")
    expect(max(again) < 96 << 20, f"up to {max(again)} bytes were sent again")  # most of it in sockets


def test_two_processes(folder):
    with FakeHub({**SMALL, "big.safetensors": big_file()}) as hub:
        hub.rate = 40e6
        both = [start("download", "org/model", env=env_of(hub, folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for _ in range(2)]
        for p in both:
            out, err = p.communicate(timeout=patience(60))
            check_sanitizers(err.decode(), p.returncode)
            same(p.returncode, 0, f"exit code after {err.decode()[-200:]}")
        check_whole(hub, folder)
        check_sent(hub, hub.files["big.safetensors"].size)
        lock = folder / "hf/hub/.locks/models--org--model" / f"{hub.files[WEIGHTS].id}.lock"
        (cache_of(hub, folder) / "blobs" / hub.files[WEIGHTS].id).unlink()
        with lock.open("r+") as held:  # another tool fetches it
            fcntl.flock(held, fcntl.LOCK_EX)
            for interrupt, code in (True, 130), (False, 0):
                with start("download", "org/model", env=env_of(hub, folder), stderr=subprocess.PIPE,
                           stdout=subprocess.DEVNULL) as p:
                    while b"is being fetched already" not in p.stderr.readline():
                        expect(p.poll() is None, "it did not wait")
                    p.send_signal(signal.SIGINT) if interrupt else fcntl.flock(held, fcntl.LOCK_UN)
                    p.stderr.read()
                    same(p.wait(patience(60)), code, f"exit code of a wait, interrupted: {interrupt}")
        check_whole(hub, folder)


# ---- the token

def test_token(folder):
    def tokens(host):
        return {q.sent_token() for q in hub.requests if q.host == host}

    secret = folder / "secret"
    secret.write_text(f"  {TOKEN}\n")
    (folder / "hf").mkdir()
    sources = [("HF_TOKEN", [], {"HF_TOKEN": TOKEN}), ("file", ["--token-file", secret], {"HF_TOKEN": "wrong"}),
               ("HF_TOKEN_PATH", [], {"HF_TOKEN_PATH": secret}), ("HF_HOME", [], {})]
    with FakeHub(SMALL, token=TOKEN) as hub:
        for name, args, env in sources:
            if name == "HF_HOME":
                (folder / "hf" / "token").write_text(TOKEN)
            hub.clear()
            shutil.rmtree(folder / "hf" / "hub", ignore_errors=True)
            r = fetch(hub, folder, *args, env=env)
            same(tokens("hub"), {TOKEN}, name)
            expect(TOKEN not in r.err + r.text, "the token is shown")
            if not has("commands"):
                continue
            d = infer("doctor", code=None, env=env_of(hub, folder, **env))
            expect(name == "file" or ("found in" in d.text and TOKEN not in d.text + d.err), d.text)
        check_whole(hub, folder)
        same((tokens("hub"), tokens("content")), ({TOKEN}, {None}), "who saw the token")
        hub.clear()
        hub.fault = lambda q: q.reply(200, body=b"{}") if q.host == "canary" else q.redirect(
            hub.canary + "/api/models/org/model/revision/main")
        refuses(hub, folder / "1", code=3, env={"HF_TOKEN": TOKEN})
        for host in (hub.url.replace("127.0.0.1", "localhost"), hub.url.replace("127.0.0.1", "127.0.0.2")):
            hub.fault = lambda q: None if "canary" in q.path else q.redirect(f"{host}/canary")
            refuses(hub, folder / "1", code=None, env={"HF_TOKEN": TOKEN})
        expect(hub.asked("canary"), "the canary was not asked")
        same(tokens("canary"), {None}, "what the canary saw")
        same({q.sent_token() for q in hub.requests if "canary" in q.path}, {None}, "what another name saw")
        hub.clear()
        hub.fault = lambda q: q.redirect(hub.canary.replace("//", f"//{hub.url[7:]}@")) if q.host == "hub" else None
        refuses(hub, folder / "1", env={"HF_TOKEN": TOKEN})
        expect(TOKEN not in str([dict(q.headers) for q in hub.requests if q.host == "canary"]) and hub.asked("canary"),
               "a canary behind a user's name saw the token")
        hub.fault = None
        r = refuses(hub, folder / "2", code=3, env={"HF_TOKEN": "hf_wrong"}, words=["the token that was given"])
        expect("hf_wrong" not in r.err, "the wrong token is shown")
        hub.fault = api(lambda q: q.error(403, "GatedRepo"))
        refuses(hub, folder / "2", env={"HF_TOKEN": TOKEN}, words=["/org/model", "licence", "no access"])
        for bad in ("a\nX-Evil: 1", "a b", "ä", "\x1b[2J"):
            refuses(hub, folder / "2", code=2, env={"HF_TOKEN": bad}, words=["HF_TOKEN"])
        secret.write_bytes(b"\0\1")
        refuses(hub, folder / "2", "--token-file", secret, code=2, words=["secret"])


def test_tls(folder):
    """https: certificates are checked, and nothing leads back to http."""
    if not shutil.which("openssl"):
        raise Skip("needs the openssl command")
    pem = folder / "pem"
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                           "-keyout", pem, "-out", folder / "crt", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
                           "subjectAltName=IP:127.0.0.1,DNS:localhost"], capture_output=True, text=True)
    expect(not made.returncode, made.stderr)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "crt", pem)
    with FakeHub(SMALL, token=TOKEN, tls=tls) as hub, FakeHub(SMALL) as plain:
        env = {"HF_TOKEN": TOKEN, "CURL_CA_BUNDLE": folder / "crt"}
        refuses(hub, folder, env={"HF_TOKEN": TOKEN}, words=["certificate"])
        fetch(hub, folder, env=env)
        check_whole(hub, folder)
        same({q.sent_token() for q in hub.requests if q.host == "content"}, {None}, "what the content host saw")
        for fault in (content, resolve, api):
            hub.fault = fault(lambda q: q.redirect(plain.url + "/x"))
            refuses(hub, folder / "1", env=env, words=['"http"', "redirects lead to https only"])
        same(plain.asked(), 0, "requests without TLS")
        hub.fault = None
        r = refuses(hub, folder / "3", env={**env, "HTTPS_PROXY": "http://user:password@127.0.0.1:1"}, words=["proxy"])
        expect("password" not in r.err, r.err)
        hub.clear()
        try:
            socket.getaddrinfo("localhost", None)  # the proxy does
        except OSError:
            raise Skip("needs localhost in /etc/hosts") from None
        fetch(hub, folder / "2", env={**env, "HTTPS_PROXY": plain.canary})
        check_whole(hub, folder / "2")
        same({q.command for q in plain.requests}, {"CONNECT"}, "what the proxy was asked for")
        expect(TOKEN not in str([dict(q.headers) for q in plain.requests]), "the proxy saw the token")
        same({q.sent_token() for q in hub.requests if q.host == "hub"}, {TOKEN}, "what the hub saw")


# ---- what can go wrong with the disk

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static long written;
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
    const char *room = getenv("SHIM_ROOM");
    long left = room ? atol(room) - written : (long)n;
    if (left <= 0) return errno = ENOSPC, -1;
    ssize_t wrote = real(fd, data, n < (size_t)left ? n : (size_t)left, at);
    written += wrote > 0 ? wrote : 0;
    return wrote;
}
int open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open"), mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    if (getenv("SHIM_READ_ONLY") && flags & O_ACCMODE) return errno = EROFS, -1;
    return real(path, flags, mode);
}
int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    struct stat st;
    if (getenv("SHIM_READ_ONLY") && stat(path, &st)) return errno = EROFS, -1;
    return real(path, mode);
}
int remove(const char *path) {
    int (*real)(const char *) = dlsym(RTLD_NEXT, "remove");
    return getenv("SHIM_READ_ONLY") ? errno = EROFS, -1 : real(path);
}
"""


def test_disk(folder):
    """No space left at byte k, and a read-only file system, by a library that stands before the C library's calls."""
    (folder / "shim.c").write_text(SHIM)
    made = subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "shim.so",
                           folder / "shim.c", "-ldl"], capture_output=True, text=True)
    expect(not made.returncode, made.stderr)
    shim = {"LD_PRELOAD": folder / "shim.so"}
    size = len(SMALL[WEIGHTS])
    with FakeHub(SMALL) as hub:
        for room in (0, 1, 100, 8192, size // 2, size - 1, size, size + 4):
            home = folder / str(room)
            refuses(hub, home, code=4, env={**shim, "SHIM_ROOM": room}, program=PLAIN,
                    words=["No space left", "the same command goes on"])
            fetch(hub, home)
            check_whole(hub, home)
        refuses(hub, folder / "ro", env={**shim, "SHIM_READ_ONLY": 1}, words=["Read-only", "HF_HOME"], program=PLAIN)
        (folder / "file").write_text("")
        refuses(hub, folder, code=1, env={"HF_HOME": folder / "file"}, words=["HF_HOME"])
        # what is complete needs no writing
        fetch(hub, folder / "0", env={**shim, "SHIM_READ_ONLY": 1, "SHIM_ROOM": 0}, program=PLAIN)
        if not has("commands"):
            return
        r = refused("rm", "org/model", env=env_of(hub, folder / "0", **shim, SHIM_READ_ONLY=1), code=5, program=PLAIN,
                    words=[f"{folder}/0/hf/hub/.locks/models--org--model: Read-only"])
        expect("HF_HOME" not in r.err, f"it is chosen already: {r.err}")


def test_room_on_the_disk(folder):
    """It is asked for before a byte is fetched; what is here needs none."""
    with FakeHub({**SMALL, "big.safetensors": big_file()}) as hub:
        fetch(hub, folder, "--include", "*.json")
        hub.clear()
        lfs(size=8 * 10 ** 15)(hub)
        r = refuses(hub, folder, code=4, words=["org/model needs 8000", "more, and", "free", "HF_HOME"])
        same([q.name for q in hub.requests if q.name], [], "what was asked for")
        expect(str(folder) in r.err, r.err)


def test_unreadable_cache(folder):
    """It is no empty one: list, and whoever looks for a model, name it."""
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("loop")
    broken = folder / "hub" / "models--org--model"
    broken.mkdir(parents=True)
    (broken / "snapshots").symlink_to("snapshots")
    for cache, word in (("file", "Not a directory"), ("loop", "Too many levels"), ("hub", "Too many levels")):
        env = {"HF_HUB_CACHE": folder / cache, "HOME": folder}
        if has("commands"):
            refused("list", code=5, env=env, cwd=folder, words=[str(folder / cache), "cannot be read", word, "HF_HUB_CACHE"])
        refused("tokenize", "zebra", env=env, cwd=folder, words=["cannot be read", word])


def test_list_tells_what_has_arrived(folder):
    """Of a download that was interrupted, all its bytes; rm says how many it frees, and asks first in a terminal."""
    needs("commands", "terminal")
    with FakeHub({**SMALL, WEIGHTS: big_file()}) as hub:
        env = env_of(hub, folder)
        hub.rate = 8e6
        p = start("download", "org/model", env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        until(lambda: hub.sent.get(WEIGHTS, 0) > 4e6, "sent")
        p.kill()
        p.communicate()
        here = sum(f.stat().st_size for f in cache_of(hub, folder).rglob("*") if f.is_file() and not f.is_symlink())
        [listed] = json.loads(infer("list", "--json", env=env, cwd=folder).text)
        same((listed["bytes"], listed["complete"]), (here, False), "bytes, complete")
        with in_terminal(hub, folder, "rm", "org/model", cwd=folder) as t:
            t.wait("Remove org/model, ", " MB? [y/N] ")
            t.send("n\n")
            same(t.ended(), 1, "exit code of a no")
        expect(cache_of(hub, folder).exists(), "removed after a no")
        with in_terminal(hub, folder, "rm", "org/model", cwd=folder) as t:
            t.wait("[y/N] ")
            t.send("y\n")
            t.wait("removed org/model: ", " MB freed")
            same(t.ended(), 0, "exit code")
        expect(not cache_of(hub, folder).exists(), "not removed after a yes")


def test_planted_links(folder):
    """Links that lead out of the cache, where files and folders are to be."""
    victim = folder / "victim"
    with FakeHub({**SMALL, "sub/a.safetensors": b"x" * 5000}) as hub:
        blob = hub.files[WEIGHTS].id
        for i, place in enumerate((f"blobs/{blob}.incomplete", f"blobs/{blob}", "blobs",
                                   "snapshots", f"snapshots/{hub.commit}", f"snapshots/{hub.commit}/sub", "refs",
                                   f"../.locks/models--org--model/{blob}.lock", "../.locks/models--org--model")):
            home = folder / str(i)
            target = victim / str(i)
            is_folder = not place.endswith((".incomplete", blob, ".lock"))
            target.mkdir(parents=True) if is_folder else (victim.mkdir(exist_ok=True), target.write_text("mine"))
            planted = cache_of(hub, home) / place
            cache_of(hub, home).mkdir(parents=True, exist_ok=True)
            planted.parent.mkdir(parents=True, exist_ok=True)
            planted.symlink_to(target)
            r = fetch(hub, home, "--all", code=None)
            expect(r.code in (0, 1), f"{place}: exit code {r.code}: {r.err}")
            same(list(target.iterdir()) if is_folder else target.read_text(), [] if is_folder else "mine", place)
            if r.code == 0:
                check_whole(hub, home, leftovers=True)


# ---- other commands

def test_list_and_rm(folder):
    with FakeHub(SMALL) as hub:
        env = env_of(hub, folder)

        def listed(expected, what, *keys):
            if has("commands"):
                found = json.loads(infer("list", "--json", env=env, cwd=folder).text)
                same([tuple(model[key] for key in keys) for model in found], expected, what)
        listed([], "an empty list")
        config = cache_of(hub, folder) / "snapshots" / hub.commit / "config.json"
        hub.fault = content(lambda q: until(config.exists, "config.json") or q.reply(404))
        refuses(hub, folder, words=["404"])
        listed([("org/model", False)], "after a failure", "name", "complete")
        hub.fault = None
        fetch(hub, folder)
        listed([("org/model", True, "gpt_oss", "MXFP4", len(SMALL[WEIGHTS]))], "the list",
               "name", "complete", "family", "encoding", "bytes")
        if has("commands"):
            text = infer("list", env=env, cwd=folder).text
            expect("org/model" in text and "complete" in text and "gpt_oss" in text, text)
            copy_model(PARROT, folder, name="models/a\nb\x1b[31m")
            text = infer("list", env=env, cwd=folder).text
            expect(text.count("\n") == 2 and "\x1b" not in text, f"a row is a line: {text!r}")
            shutil.rmtree(folder / "models")
        refused("tokenize", "org/modle", env=env, words=["none of the models", "org/model"])
        refused("tokenize", "something/else", env=env, words=["org/model", "infer download"])
        refused("tokenize", "", env=env, words=["none of the models", "org/model"])  # as from an unset variable
        offline = {**env, "HF_HUB_OFFLINE": 1}
        hub.clear()
        infer(*ASK, env=offline, cwd=folder)
        weights = cache_of(hub, folder) / "snapshots" / hub.commit / WEIGHTS
        weights.unlink()
        refused("play", "org/model", "-p", "hello", env=offline, cwd=folder, words=["incomplete", "infer download"])
        refuses(hub, folder, env={"HF_HUB_OFFLINE": 1}, words=["HF_HUB_OFFLINE"])
        same(hub.asked(), 0, "requests while offline")
        if not has("commands"):
            return
        fetch(hub, folder)
        refused("rm", "something/else", env=env, cwd=folder)
        for bad in ("../x", "/", ".", "org/../x", ""):
            refused("rm", bad, env=env, cwd=folder, code=2)
        hub.rate = 1e5
        hub.files["new.safetensors"] = File(NOISE)
        p = start("download", "org/model", env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        until(lambda: hub.sent.get("new.safetensors"), "sent")
        refused("rm", "org/model", env=env, cwd=folder, code=1, words=["another process"])
        p.kill()
        p.communicate()
        infer("rm", "mode", env=env, cwd=folder)
        listed([], "after rm")
        same([p for p in (folder / "hf/hub").rglob("*model*")], [], "in the cache")


def test_inspect(folder):
    """A folder and a repository give the same facts; of the repository only headers are fetched."""
    needs("commands")
    (folder / "tmp").mkdir()
    with FakeHub(SMALL, repository="org/parrot") as hub:
        env = env_of(hub, folder, TMPDIR=folder / "tmp")
        local = json.loads(infer("inspect", PARROT, "--json", env=env).text)
        far = json.loads(infer("inspect", "org/parrot", "--json", env=env).text)
        _, values = read_safetensors(PARROT / WEIGHTS)
        same({k: v for k, v in far.items() if k not in ("name", "bytes_to_download")},
             {k: v for k, v in local.items() if k not in ("name", "chat_format", "complete")}, "facts")
        same((local["chat_format"], local["complete"]), ("harmony", True), "chat format, complete")
        odd = json.loads(infer("inspect", PARROT.parent / "odd", "--json", env=env).text)
        same((odd["supported"], odd["complete"]), (True, False), "of a model without tokenizer.json: supported, complete")
        same(far["weight_bytes"], len(values), "bytes")
        same(sum(far[key] for key in far if key.startswith("bytes_of_")), len(values), "bytes by kind and encoding")
        same(far["bytes_to_download"], sum(map(len, SMALL.values())), "to download")
        expect(hub.sent[WEIGHTS] < 20000, f"{hub.sent[WEIGHTS]} bytes of the weights were fetched")
        expect(not (folder / "hf").exists(), "something was written")
        text = infer("inspect", "org/parrot", "--ctx", "128", env=env).text
        refused("inspect", "org/parrot", "--ctx", "5000", env=env, code=2, words=["5000", "4096"])
        for word in ("gpt_oss", "MXFP4", "experts", "cache bytes", "to download", "fits"):
            expect(word in text, f"lacks {word}: {text}")
        same([*(folder / "tmp").iterdir()], [], "what was left")
        refused("inspect", "org/nothing", env=env, words=["/org/nothing"])
        for path in ("/no/such", "./no", folder / "no"):  # paths, never repositories
            refused("inspect", path, env=env, cwd=folder, words=[str(path), "No such file or directory"])
        hub.fault = lambda q: q.stall() if q.name == WEIGHTS else None
        with in_terminal(hub, folder, "inspect", "org/parrot", TMPDIR=folder / "tmp") as t:
            until(lambda: any(q.name == WEIGHTS for q in hub.requests[-1:]), "asked for")
            os.kill(t.process.pid, signal.SIGINT)
            same(t.ended(), 130, "exit code of an interrupted inspect")
        hub.fault = None
        same([*(folder / "tmp").iterdir()], [], "what an interrupt left")
        config = {**read_json(PARROT / "config.json"), "model_type": "zebra\x1b[2J\x9b"}
        hub.files["config.json"] = File(json.dumps(config).encode())
        r = infer("inspect", "org/parrot", env=env, code=3)
        expect("zebra?[2J?" in r.text and "not supported" in r.err, r.text + r.err)
        for text in (r.text, r.err):
            expect("org/parrot/config.json" in text and str(folder) not in text, f"where it is: {text}")
        foreign = json.loads(infer("inspect", "org/parrot", "--json", env=env, code=3).text)
        same(foreign["supported"], False, "supported")
        copy = copy_model(PARROT, folder, config={"model_type": config["model_type"]}, name="models/strange")
        listed = infer("list", cwd=folder, env=env).text
        expect("zebra?[2J?" in listed and "strange" in listed and copy.exists(), listed)
        expect("not supported" in listed, f"not marked: {listed}")
        hub.files["config.json"] = File(SMALL["config.json"])
        wrong = [("a header beyond the file", b"\xff" * 7 + b"\0" + values), ("no header", bytes(8) + values),
                 ("no JSON", safetensors("{", values)), ("7 bytes", b"1234567")]
        for name, raw in wrong:
            hub.files[WEIGHTS] = File(raw, large=True)
            expect(infer("inspect", "org/parrot", env=env, code=3).err, name)
        hub.files[WEIGHTS] = File(SMALL[WEIGHTS])
        hub.fault = content(change(ignore_range=True))
        refused("inspect", "org/parrot", env=env, code=5, words=["more than the 8 bytes"])


def test_inspect_says_each_thing_once(folder):
    """A number a row, types by their names, rows in one order, nothing of experts in a dense model, a bar of memory."""
    needs("commands", "families", "encodings", "terminal")
    fixtures = PARROT.parent

    def check(name, model, dense, tensors):
        with Terminal("inspect", model, columns=60) as t:
            same(t.ended(), 0, "exit code")
        lines = t.text().splitlines()
        rows = {line[:24].strip(): line[24:] for line in lines if line[24:].strip() and line[0] not in "█▓▒░"}
        same([n for n in rows if "experts" in n and "," not in n], [] if dense else ["experts", "experts per token"], "rows")
        same([n for n in rows if ", " in n], tensors, "kinds of tensors")
        wrong = {n: v for n, v in rows.items() if len(re.findall(r"\d[\d.,]*", v)) > 1 and n not in ("name", "gpu", "gpus")}
        same(wrong, {}, "rows of two numbers")
        bar = next(line for line in lines if line[0] == "█")
        expect(re.fullmatch("█+▓*▒+░*", bar) and len(bar) == 60, f"the bar {bar!r}")
    each([("dense", fixtures / "gguf" / "Q4_K_M.gguf", True, ["embedding, Q6_K", "attention, Q4_K", "attention, F16",
                                                              "attention, Q6_K", "mlp, F16", "mlp, Q4_K", "rest, F32"]),
          ("experts", fixtures / "qwen3_moe", False, ["embedding, BF16", "attention, BF16", "mlp, BF16", "experts, BF16",
                                                      "head, BF16", "rest, BF16"])], check)


def test_same_names(folder):
    """Every command takes the same names for a model that is here, and none asks the hub."""
    bench = [["bench", "-p", 4, "-n", 2, "-d", 0, "-b", 1, "-r", 1]] * has("commands")
    with FakeHub(SMALL) as hub:
        env = env_of(hub, folder)
        fetch(hub, folder)
        hub.clear()
        path = cache_of(hub, folder) / "snapshots" / hub.commit
        (folder / "models").mkdir()
        for name in ("org/model", "rg/mod", "mode", path, "org/model@main", f"org/model@{hub.commit}"):
            for command in (["tokenize", name], ["play", name, "-p", "hello", "--raw", "--max-tokens", 1],
                            *[["inspect", name], *([*b, name] for b in bench)] * has("commands")):
                infer(*command, env=env, cwd=folder)
        for command in (*bench, ["play", "-p", "hi", "--raw", "--max-tokens", 1]):
            infer(*command, env=env, cwd=folder)  # the only one
        refused("play", "org/model@other", "-p", "hello", env=env, cwd=folder, words=["none of the models", "org/model"])
        if has("commands"):
            refused("rm", "org/model@main", env=env, cwd=folder, code=2, words=["all revisions"])
        same(hub.asked(), 0, "requests")
        copy_model(PARROT, folder, name="models/model")
        for command in (["tokenize", "mode"], *[["rm", "mode"], ["inspect", "mode"], ["bench", "mode"]] * has("commands")):
            refused(*command, env=env, cwd=folder, words=["models/model", "org/model"])
        for command in (["play", "-p", "hi"], *[["bench"]] * has("commands")):
            r = infer(*command, env=env, cwd=folder, code=2)
            expect("models/model" in r.err and "org/model" in r.err, r.err)
        same(hub.asked(), 0, "requests")
        if not has("commands"):
            return
        refused("rm", "models/model", env=env, cwd=folder, code=2, words=["models/model", "is not in the hub's cache"])
        expect((folder / "models/model/config.json").exists(), "a model outside of the cache was removed")
        refused("rm", path / "../../..", env=env, cwd=folder, code=2, words=["is not in the hub's cache"])
        (path / "a.gguf").write_bytes(b"GGUF")
        for part in (*[path / "a.gguf", "a.gguf"] * has("encodings"), cache_of(hub, folder) / "refs"):
            refused("rm", part, env=env, cwd=folder, code=2, words=["is a part of org/model", "infer rm org/model"])
        expect((path / "config.json").exists(), "a part was named, and the repository removed")
        only = cache_of(hub, folder).parent / "models--org--only/snapshots/1"
        only.mkdir(parents=True)
        (only / "b.gguf").write_bytes(b"GGUF")
        if has("encodings"):
            infer("rm", "rg/onl", env=env, cwd=folder)
            expect(not only.exists(), "rm of a part of the name, where a model is one file")
        r = infer("rm", path, env=env, cwd=folder)
        expect(re.fullmatch(r"removed org/model: [\d.]+ kB freed\n", r.err), f"rm says what is gone: {r.err}")
        expect(not cache_of(hub, folder).exists(), "rm of a path")
        same(hub.asked(), 0, "requests")


def test_doctor(folder):
    needs("commands")
    with FakeHub(SMALL, repository="openai/gpt-oss-20b") as hub:
        env = env_of(hub, folder)
        r = infer("doctor", env=env, code=None)
        for word in ("GPU", str(folder / "hf" / "hub"), "free", "token", "answers in"):
            expect(word in r.text, f"lacks {word}: {r.text}")
        expect("✓ network" in r.text and "✓ cache" in r.text, r.text)
        expect("not tried" in infer("doctor", env={**env, "HF_HUB_OFFLINE": 1}, code=None).text, "offline")
        hub.token = TOKEN
        r = infer("doctor", env={**env, "HF_TOKEN": "x"}, code=None)
        expect("✗ network" in r.text and "/settings/tokens" in r.text, r.text)
        expect("does not answer" not in r.text, f"the hub answers: {r.text}")
    r = infer("doctor", env={"HF_HOME": "/none/of/these/is/here", "HF_HUB_OFFLINE": 1}, code=None)
    expect("0 bytes free" not in r.text, f"the root is the nearest folder that exists: {r.text}")
    for home in ("new", "new/and/newer"):
        r = infer("doctor", env={"HF_HOME": home, "HF_HUB_OFFLINE": 1}, cwd=folder, code=None)
        expect("✓ cache" in r.text and "0 bytes free" not in r.text, f"a relative path begins here: {r.text}")
    r = infer("doctor", env={"HF_HOME": "/dev/null", "HF_HUB_OFFLINE": 1}, code=5)
    expect("✗ cache" in r.text, f"nothing can be written below a file: {r.text}")
    for name, value in ("HF_ENDPOINT", "nothing"), ("HF_TOKEN", "two words"):
        r = infer("doctor", env={**env, name: value}, code=2)
        expect("✗ network" in r.text and name in r.text, r.text)
    r = infer("doctor", env={**env, "HF_ENDPOINT": "http://127.0.0.1:1"}, code=None)
    expect(r.code in (5, 4) and "✗ network" in r.text and "is the network up?" in r.text, r.text)
    expect("goes on" not in r.text, f"doctor downloads nothing: {r.text}")


# ---- in a terminal

def in_terminal(hub, folder, *args, columns=80, cwd=None, **env):
    return Terminal(*args, columns=columns, cwd=cwd, **env_of(hub, folder, **env))


def test_terminal(folder):
    with FakeHub({**SMALL, "big.safetensors": big_file()}) as hub:
        hub.rate = 8e6
        with in_terminal(hub, folder, "download", "org/model") as t:
            drawn = "% of 70.3 MB  big.safetensors\n", "░", "% of 71.1 MB, ", "/s, ", " s left"
            t.wait("✓ config.json", *drawn * has("terminal"))
            sent = hub.sent.get("big.safetensors", 0)
            until(lambda: hub.sent.get("big.safetensors", 0) > sent + (12 << 20), "sent")
            os.kill(t.process.pid, signal.SIGINT)
            t.wait("interrupted; the same command goes on (", " of 71.1 MB are here)")
            same(t.ended(), 130, "exit code")
        hub.rate = None
        hub.clear()
        with in_terminal(hub, folder, "download", "org/model") as t:
            t.wait("✓ big.safetensors", str(cache_of(hub, folder)))
            same(t.ended(), 0, "exit code")
        expect(hub.sent["big.safetensors"] < hub.files["big.safetensors"].size - (1 << 20), "nothing was kept")
        check_whole(hub, folder)
        hub.fault = lambda q: q.stall()
        before = len(hub.requests)
        with in_terminal(hub, folder / "1", "download", "org/model") as t:
            until(lambda: len(hub.requests) > before, "asked")
            os.kill(t.process.pid, signal.SIGINT)
            same(t.ended(), 130, "exit code before anything has arrived")


def test_offer(folder):
    """A MODEL that is not here is offered for download where somebody can answer."""
    needs("terminal")
    with FakeHub(SMALL) as hub:
        with in_terminal(hub, folder, *ASK) as t:
            t.wait("Download it? [y/N] ")
            t.send("n\n")
            same(t.ended(), 3, "exit code")
        same(hub.asked(), 0, "requests after a no")
        fetch(hub, folder, "--include", "*.json")
        with in_terminal(hub, folder, *ASK) as t:
            t.wait("is not here whole. Download it? [y/N] ")
            t.send("y\n")
            t.wait("✓ model.safetensors", " tokens/s")
            same(t.ended(), 0, "exit code")


def test_shards_in_a_narrow_terminal(folder):
    """Shards can be told apart, and the terminal is told to cut lines that are longer than it is wide."""
    needs("terminal")
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    with FakeHub({**SMALL, **{name: NOISE + bytes([i]) for i, name in enumerate(names)}}) as hub:
        hub.rate = 2e5
        with in_terminal(hub, folder, "download", "org/model", columns=40) as t:
            for part in (name[:20] for name in names):
                while part not in t.text():
                    t.wait("MB")
            os.kill(t.process.pid, signal.SIGINT)
            same(t.ended(), 130, "exit code")
        cut = re.findall(rb"\x1b\[\?7l([^\x1b]*)\x1b\[", t.raw)
        for name in names:
            expect(any(f" of 1.0 MB  {name}"[:32].encode() in part for part in cut), f"{name} is not in {cut[-3:]}")


# ---- what infer cannot run

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 13761264768\n"


def test_foreign(folder):
    """A model that infer cannot run is not fetched, unless all is asked for; files are named as what they are."""
    config = json.dumps({**read_json(PARROT / "config.json"), "model_type": "zebra"}).encode()
    with FakeHub({**SMALL, "config.json": config}) as hub:
        refuses(hub, folder, code=3, words=["org/model", "'zebra'", "gpt_oss", "--all"])
        same(sorted({q.name for q in hub.requests if q.name}), ["config.json"], "what was asked for")
        refuses(hub, folder, code=3, words=["'zebra'"])  # nor the next time
        r = fetch(hub, folder, "--all")
        check_whole(hub, folder)
        expect("infer play" not in r.err, r.err)
        hub.files["config.json"] = File(b"{}")
        refuses(hub, folder / "1", code=3, words=["model_type"])
    for name in ["pytorch_model.bin"] + ["model-Q4_K_M.gguf"] * has("encodings"):
        with FakeHub({**SMALL, WEIGHTS: b"", name: b"x" * 9999}) as hub:
            del hub.files[WEIGHTS]
            refuses(hub, folder / "2", code=3, words=["safetensors", name, "--all"])
    with FakeHub({**SMALL, WEIGHTS: POINTER}) as hub:
        refuses(hub, folder / "3", code=3, words=[WEIGHTS, "a Git-LFS pointer", "/org/model"])
        fetch(hub, folder / "3", "--all")


def test_no_network(folder):
    """One line for a cause, however many connections it has; the last line says that the same command goes on."""
    with FakeHub({**SMALL, **{f"many-{i}.safetensors": NOISE[i:] for i in range(8)}}) as hub:
        part = 1 << 19
        hub.fault = content(lambda q: q.reset() if hub.sent.get(q.name, 0) > part else q.__dict__.update(only=part))
        r = refuses(hub, folder, words=["is the network up?", "HTTPS_PROXY", "the same command goes on (", "are here)"])
        trouble = [line for line in r.err.splitlines() if "trying again" in line]
        same(len(trouble), len({*trouble}), f"lines of trouble, {trouble}")
        hub.fault = None
        fetch(hub, folder)
        check_whole(hub, folder)
    r = refuses(hub, folder, at="@other", words=["is the network up?", "the same command goes on"])
    expect(len(r.err.splitlines()) <= 2, r.err)


# ---- other tools

CLIENT = """
import json, sys
from huggingface_hub import snapshot_download, try_to_load_from_cache
print(snapshot_download("org/model", local_files_only=sys.argv[1] == "local"))
"""


def test_python_client(folder):
    """huggingface_hub finds what infer fetched without a request, and infer what huggingface_hub fetched."""
    python = os.environ.get("HUB_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import huggingface_hub"], capture_output=True).returncode:
        raise Skip("needs huggingface_hub (HUB_PYTHON names a Python that has it)")

    def client(home, how):
        env = environment(**env_of(hub, home, HF_HUB_DISABLE_XET=1, HF_HUB_DISABLE_TELEMETRY=1))
        r = subprocess.run([python, "-c", CLIENT, how], env=env, capture_output=True, text=True, timeout=patience(120))
        expect(not r.returncode, r.stderr[-500:])
        return r.stdout
    with FakeHub({**SMALL, "sub/x.txt": b"y", "big.safetensors": big_file()}) as hub:
        ours = fetch(hub, folder / "ours", "--all").text
        hub.clear()
        same(client(folder / "ours", "local"), ours, "path")
        same(hub.asked(), 0, "requests")
        client(folder / "ours", "online")
        same(hub.sent, {}, "contents that huggingface_hub fetched again")
        check_whole(hub, folder / "ours")
        hub.clear()
        theirs = client(folder / "theirs", "online")
        hub.clear()
        same(fetch(hub, folder / "theirs", "--all").text, theirs, "path")
        same(hub.sent, {}, "contents that infer fetched again")
        check_whole(hub, folder / "theirs")
        hub.clear()
        same(fetch(hub, folder / "theirs", env={"HF_HUB_OFFLINE": 1}).text, theirs, "path")
        same(hub.asked(), 0, "requests")
