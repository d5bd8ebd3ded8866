"""A proxy between a client of S3 and its server, which counts what passes and makes requests fail as networks do."""

from __future__ import annotations

import http.client
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REFUSED = b"<Error><Code>PreconditionFailed</Code><Message>no</Message><Condition>%s</Condition></Error>"
SLOW = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
KINDS = ("503", "cut", "stall", "lost answer", "412 after success", "old listing")


@dataclass(frozen=True)
class Asked:
    """A request. verb: head, get, list, put, begin, part, complete, abort, uploads, delete, copy or other."""

    verb: str
    key: str
    number: int

    @classmethod
    def of(cls, method: str, target: str, headers: Any, number: int) -> Asked:
        """What a line of HTTP asks for."""
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        verbs = {
            "GET": "uploads" if "uploads" in query else "list" if "list-type" in query else "get",
            "HEAD": "head",
            "PUT": "part" if "partNumber" in query else "copy" if headers.get("x-amz-copy-source") else "put",
            "POST": "begin" if "uploads" in query else "complete" if "uploadId" in query else "delete",
            "DELETE": "abort" if "uploadId" in query else "delete",
        }
        key = unquote(parts.path).strip("/")
        if verbs[method] == "list":
            key += "/" + query.get("prefix", [""])[0].rstrip("/")
        return cls(verbs[method], key, number)


@dataclass
class Harm:
    """A failure of the requests for which ``when`` holds, the first ``times`` of them. kind: one of ``KINDS``."""

    kind: str
    when: Callable[[Asked], bool]
    times: int = 1


@dataclass
class Passed:
    """What went through. asked: every request. sent: bytes of the answers by verb. struck: requests that failed."""

    asked: list[Asked] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    struck: list[Asked] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked, harm = self.proxy.next(self.command, self.path, self.headers)
        kind = "" if harm is None else harm.kind
        if kind == "503":
            self._answer(503, [], SLOW)
        elif kind == "stall":
            self.proxy.ended.wait()  # until the test is over: the client must not wait for it
            self.close_connection = True
        else:
            status, headers, content = self.proxy.forward(self.command, self.path, dict(self.headers), body)
            if asked.verb == "list":
                content = self.proxy.listing(asked, content, old=kind == "old listing")
            if kind == "412 after success":
                condition = b"If-None-Match" if self.headers.get("If-None-Match") else b"If-Match"
                status, headers, content = 412, [], REFUSED % condition
            if kind == "lost answer":
                self.close_connection = True
            else:
                self.proxy.passed.sent[asked.verb] += len(content)  # before the answer: a reader goes on as it has it
                self._answer(status, headers, content, cut=len(content) // 2 if kind == "cut" else None)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _answer(self, status: int, headers: Sequence[tuple[str, str]], content: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        length = lengths[0] if self.command == "HEAD" and lengths else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about clients that went away: tests kill them."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Proxy:
    """A proxy of one server.

    Attributes:
        passed: What went through.
        harms: Failures to come.
        watch: Called with every request before it is forwarded; what it raises breaks the connection.
        ended: Set at the end.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._listings: dict[str, bytes] = {}
        self.passed = Passed()
        self.harms: list[Harm] = []
        self.watch: Callable[[Asked], object] = lambda asked: None
        self.ended = threading.Event()

    def next(self, method: str, target: str, headers: Any) -> tuple[Asked, Harm | None]:
        """Count a request and return it, with the failure that it meets."""
        with self._lock:
            asked = Asked.of(method, target, headers, len(self.passed.asked))
            self.passed.asked.append(asked)
            harm = next((harm for harm in self.harms if harm.times and harm.when(asked)), None)
            if harm is not None:
                harm.times -= 1
                self.passed.struck.append(asked)
        self.watch(asked)
        return asked, harm

    def forward(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, Any, bytes]:
        """Return what the server answers."""
        server = http.client.HTTPConnection(self._upstream)
        headers.pop("Expect", None)
        try:
            server.request(method, target, body, headers)
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def listing(self, asked: Asked, content: bytes, *, old: bool) -> bytes:
        """Return an answer to a listing: the first one of this folder if it is to be ``old``."""
        with self._lock:
            first = self._listings.setdefault(asked.key, content)
        return first if old else content

    def verbs(self) -> Counter[str]:
        """Return how often was asked for each verb."""
        return Counter(asked.verb for asked in self.passed.asked)


@contextmanager
def proxied(upstream: str) -> Iterator[tuple[Proxy, str]]:
    """Yield a proxy of a server and its endpoint."""
    proxy = Proxy(upstream)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="bucket-proxy", daemon=True)
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_port}"
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
