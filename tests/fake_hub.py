"""A small hub for tests: the parts of the hub's API that a download needs, and every way in which it can go wrong.

    python3 tests/fake_hub.py FOLDER [ORG/NAME]      serves a folder until Ctrl+C, and says how to use it

Two servers on localhost: the hub, and a content host to which it redirects large files with signed addresses. Every
request is kept in `requests`; `fault`, a function of the request, may answer it or change how it is answered.
"""
import copy
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = 4096  # bytes from which a file is kept by the content host


class File:
    """content: bytes, or the path of a file. large: kept by the content host under its sha256."""

    def __init__(self, content, large=None):
        self.content = content
        self.size = content.stat().st_size if isinstance(content, Path) else len(content)
        self.large = self.size >= LARGE if large is None else large
        digest = hashlib.sha256() if self.large else hashlib.sha1(b"blob %d\0" % self.size)
        if isinstance(content, Path):
            with content.open("rb") as f:
                while part := f.read(1 << 20):
                    digest.update(part)
        else:
            digest.update(content)
        self.id = digest.hexdigest()

    def bytes(self):
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content


class Request(BaseHTTPRequestHandler):
    """Besides what the base class has: `name` of the file that is asked for, or None; `begin` and `end` of its Range.
    A fault may set: ignore_range, wrong_start, only (bytes that are sent before the connection is reset), flip (a byte
    whose lowest bit is turned), extra (headers; None removes one), rate (bytes a second)."""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def setup(self):
        super().setup()
        self.hub, self.host = self.server.hub, self.server.host

    def do_HEAD(self):
        self.do_GET()

    def do_CONNECT(self):
        """As a proxy: passes on bytes that it cannot read."""
        self.name = None
        self.hub.requests.append(copy.copy(self))
        host, port = self.path.split(":")
        with socket.create_connection((host, int(port))) as other:
            self.reply(200, {"Content-Length": None})
            back = threading.Thread(target=self.pump, args=(other, self.connection), daemon=True)
            back.start()
            self.pump(self.connection, other)
            back.join()
        self.close_connection = True

    @staticmethod
    def pump(source, sink):
        try:
            while part := source.recv(1 << 16):
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def do_GET(self):
        self.name = self.begin = self.end = self.only = self.flip = None
        self.ignore_range = self.wrong_start = False
        self.extra, self.rate = {}, self.hub.rate
        self.url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(self.url.query))
        if self.headers.get("Range"):
            first, last = self.headers["Range"].split("=")[1].split("-")
            self.begin, self.end = int(first), int(last) + 1 if last else None
        parts = urllib.parse.unquote(self.url.path).strip("/").split("/")
        if parts[0] == "content":
            self.name = self.query.get("name")
        elif len(parts) > 4 and parts[2] == "resolve":
            self.name = "/".join(parts[4:])
        self.hub.requests.append(copy.copy(self))  # a connection that stays open has one handler for all
        try:
            if self.hub.fault and self.hub.fault(self):
                return
            if self.host == "content":
                self.serve_content()
            elif parts[:2] == ["api", "models"]:
                self.serve_api(parts)
            elif self.url.path == "/api/whoami-v2":
                self.serve_whoami()
            elif self.name is not None:
                self.serve_file("/".join(parts[:2]), parts[3])
            else:
                self.reply(404)
        except OSError:  # the client has gone
            self.close_connection = True

    def sent_token(self):
        return self.headers.get("Authorization", "").partition("Bearer ")[2] or None

    def reply(self, status, headers=(), body=b""):
        """Answers; a dict or list is sent as JSON. True, so that a fault can return it."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **dict(headers)}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def error(self, status, code):
        return self.reply(status, {"X-Error-Code": code, "X-Error-Message": code})

    def redirect(self, to, status=302):
        return self.reply(status, {"Location": to})

    def reset(self):
        """Ends the connection with a TCP reset."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        return True

    def stall(self, seconds=3600):
        self.hub.ended.wait(seconds)
        return self.reset()

    def refused(self):
        """Refuses a request without the token, if the hub has one; False: it may go on."""
        if not self.hub.token or self.sent_token() == self.hub.token:
            return False
        return self.error(401, "RepoNotFound")

    def serve_whoami(self):
        if self.sent_token() != (self.hub.token or "none"):
            return self.reply(401)
        return self.reply(200, body={"name": "somebody"})

    def serve_api(self, parts):
        hub, repository, kind = self.hub, "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "revision"
        revision = "/".join(parts[5:]) or "main"
        if self.refused():
            return None
        if repository not in hub.names:
            return self.error(401, "RepoNotFound")
        if repository != hub.repository:  # it was renamed
            return self.redirect(self.path.replace(repository, hub.repository, 1), 307)
        if revision not in (*hub.revisions, hub.commit):
            return self.error(404, "RevisionNotFound")
        def listed(name, file, path, git_hash, sha256):
            """An entry of a list of files. There are two lists, which name its fields differently."""
            entry = {path: name, "size": file.size,
                     git_hash: hashlib.sha1(name.encode()).hexdigest() if file.large else file.id}
            if file.large:
                entry["lfs"] = {sha256: file.id, "size": file.size, "pointerSize": 135}
            return {**entry, **hub.listed.get(name, {})}

        if kind == "tree":  # what huggingface_hub asks for
            entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
                       for name in sorted({str(Path(name).parent) for name in hub.files} - {"."})]
            entries += [{"type": "file", **listed(name, file, "path", "oid", "oid")}
                        for name, file in hub.files.items()]
            return self.reply(200, self.extra, entries)
        siblings = [listed(name, file, "rfilename", "blobId", "sha256") if "blobs" in self.query else
                    {"rfilename": name} for name, file in hub.files.items()]
        return self.reply(200, self.extra, {"_id": "0", "id": hub.repository, "modelId": hub.repository,
                                            "sha": hub.commit, "private": False, "tags": [], "downloads": 0, "likes": 0,
                                            "siblings": siblings})

    def serve_file(self, repository, revision):
        hub, file = self.hub, self.hub.files.get(self.name)
        if self.refused():
            return None
        if repository not in hub.names:
            return self.error(401, "RepoNotFound")
        if revision not in (*hub.revisions, hub.commit):
            return self.error(404, "RevisionNotFound")
        if not file:
            return self.error(404, "EntryNotFound")
        head = {"X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
        if file.large:
            hub.signed += 1
            name = urllib.parse.quote(self.name, safe="")
            return self.reply(302, {**head, "X-Linked-Size": file.size, "X-Linked-ETag": f'"{file.id}"',
                                    "Location": f"{hub.content}/content/{file.id}?name={name}&signature={hub.signed}",
                                    **self.extra})
        if "cached" not in self.query:
            return self.reply(307, {**head, "ETag": f'"{file.id}"', "X-Linked-Size": file.size,
                                    "X-Linked-ETag": f'"{file.id}"', "Location": self.url.path + "?cached=1",
                                    **self.extra})
        return self.send_file(file, {**head, "ETag": f'"{file.id}"', **self.extra})

    def serve_content(self):
        file = self.hub.files.get(self.name)
        if not file or self.sent_token():  # a content host refuses two kinds of credentials
            return self.reply(400)
        return self.send_file(file, self.extra)

    def send_file(self, file, headers):
        begin, end = 0, file.size
        partial = self.begin is not None and not self.ignore_range
        if partial:
            begin, end = self.begin, min(self.end or file.size, file.size)
            if begin >= file.size:
                return self.reply(416, {"Content-Range": f"bytes */{file.size}"})
            headers = {"Content-Range": f"bytes {begin + self.wrong_start}-{end - 1}/{file.size}", **headers}
        self.send_response(206 if partial else 200)
        for name, value in {"Content-Length": end - begin, "Accept-Ranges": "bytes", **headers}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return None
        stop = end if self.only is None else min(end, begin + self.only)
        self.send_bytes(file, begin, stop)
        return self.reset() if stop < end else None

    def send_bytes(self, file, begin, end):
        self.wfile.flush()
        if isinstance(file.content, Path) and not self.rate and self.flip is None:
            with file.content.open("rb") as f:
                while begin < end:
                    sent = os.sendfile(self.connection.fileno(), f.fileno(), begin, end - begin)
                    self.hub.count(self.name, sent)
                    begin += sent
            return
        content, step = memoryview(file.bytes()), 1 << 16
        while begin < end:
            part = bytes(content[begin:min(begin + step, end)])
            if self.flip is not None and begin <= self.flip < begin + len(part):
                at = self.flip - begin
                part = part[:at] + bytes([part[at] ^ 1]) + part[at + 1:]
            self.connection.sendall(part)
            self.hub.count(self.name, len(part))
            begin += len(part)
            if self.rate:
                time.sleep(len(part) / self.rate)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request, client_address):
        """Prints nothing when a client resets its connection."""


class FakeHub:
    """A hub with one repository of the files {name: bytes, path or File}; use it in a `with`."""

    def __init__(self, files, repository="org/model", token=None, tls=None):
        self.files = {name: f if isinstance(f, File) else File(f) for name, f in files.items()}
        self.repository, self.names, self.token = repository, {repository}, token
        self.commit = hashlib.sha1("".join(f.id for f in self.files.values()).encode()).hexdigest()
        self.revisions = {"main"}
        self.rate, self.fault, self.signed = None, None, 0
        self.listed = {}  # fields of the list of files that are wrong, by name
        self.requests, self.sent, self.ended, self.lock = [], {}, threading.Event(), threading.Lock()
        self.servers = {}
        for host in ("hub", "content", "canary"):
            server = self.servers[host] = Server(("127.0.0.1", 0), Request)
            server.hub, server.host = self, host
            if tls:
                server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "https" if tls else "http"
        self.url, self.content, self.canary = (f"{scheme}://{name}:{server.server_port}" for name, server in zip(
            ("127.0.0.1", "localhost", "127.0.0.1"), self.servers.values()))

    def __enter__(self):
        for server in self.servers.values():
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        for server in self.servers.values():
            server.shutdown()
            server.server_close()

    def count(self, name, n):
        with self.lock:
            self.sent[name] = self.sent.get(name, 0) + n

    def clear(self):
        self.requests.clear()
        self.sent.clear()

    def asked(self, host=None):
        """How many requests there were."""
        return sum(r.host == host or not host for r in self.requests)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    with FakeHub(found, *sys.argv[2:3]) as served:
        print(f"HF_ENDPOINT={served.url} infer download {served.repository}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
