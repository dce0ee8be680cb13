"""A small S3 server on the loopback device, which fails on request: what a test needs of a gateway that misbehaves.

It knows the requests that kvfs makes: GET with a range, PUT with If-None-Match, DELETE, ListObjectsV2. Signatures are
not checked, but a request without one is refused, and one with an access key that is not ``accepted`` any more.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: What a fault does to a request: nothing (None), or one of these; "404" is a missing bucket, "skew" a wrong clock.
FAULTS = ("503", "403", "skew", "cut", "flip", "hang", "drop")
REFUSED = {
    "503": (503, "SlowDown"), "403": (403, "AccessDenied"), "404": (404, "NoSuchBucket"),
    "skew": (403, "RequestTimeTooSkewed"), "expired": (400, "ExpiredToken"),
}  # fmt: skip


class S3Server:
    """Objects of any bucket in memory. ``fault(method, key, number)`` says what goes wrong with a request."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.requests: Counter[str] = Counter()
        self.accepted: str | None = None  # access key; None: all
        self.fault: Callable[[str, str, int], str | None] = lambda method, key, number: None
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        outer = self

        class Handler(_Handler):
            server_ = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.stopped.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    server_: S3Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _begin(self) -> tuple[str, dict[str, list[str]], str | None, bytes]:
        url = urlsplit(self.path)
        key = unquote(url.path).partition("/")[2].partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server_.lock:
            self.server_.requests[self.command] += 1
            number = sum(self.server_.requests.values())
        fault = self.server_.fault(self.command, key, number)
        if "Authorization" not in self.headers:
            fault = "403"
        elif self.server_.accepted and f"Credential={self.server_.accepted}/" not in self.headers["Authorization"]:
            fault = "expired"
        if fault == "hang":
            self.server_.stopped.wait(60)
            fault = "drop"
        if fault == "drop":
            self.close_connection = True
        elif fault in REFUSED:
            status, code = REFUSED[fault]
            self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())
        return key, parse_qs(url.query, keep_blank_values=True), fault, body

    def _answer(self, status: int, body: bytes = b"", sent: bytes | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if sent is None else sent)

    def do_GET(self) -> None:
        key, query, fault, _ = self._begin()
        if fault in (*REFUSED, "drop"):
            return
        if "list-type" in query:
            self._list(query)
            return
        found = self.server_.objects.get(key)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data, at = found
        first, last, status = 0, len(data) - 1, 200
        if "Range" in self.headers:
            begin, _, end = self.headers["Range"].partition("=")[2].partition("-")
            first, last, status = int(begin), min(int(end or len(data) - 1), len(data) - 1), 206
            if first >= len(data):
                self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                return
        body = data[first : last + 1]
        sent = body
        if fault == "flip":
            sent = body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :]
        if fault == "cut":
            sent, self.close_connection = body[: len(body) // 2], True
        headers = {"Last_Modified": formatdate(at, usegmt=True), "ETag": _etag(data)}
        if status == 206:
            headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        self._answer(status, body, sent, **headers)

    def do_PUT(self) -> None:
        key, _, fault, body = self._begin()
        if fault in (*REFUSED, "drop"):
            return
        with self.server_.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.server_.objects:
                status = 412
            else:
                self.server_.objects[key] = (body, time.time())
                status = 200
        if fault == "cut":  # the answer is lost, the object is there
            self.close_connection = True
            return
        self._answer(
            status, b"" if status == 200 else b"<Error><Code>PreconditionFailed</Code></Error>", ETag=_etag(body)
        )

    def do_DELETE(self) -> None:
        key, _, fault, _ = self._begin()
        if fault not in (*REFUSED, "drop"):
            self.server_.objects.pop(key, None)
            self._answer(204)

    def do_POST(self) -> None:  # DeleteObjects
        _, _, fault, body = self._begin()
        if fault in (*REFUSED, "drop"):
            return
        gone = [part.partition("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
        for key in gone:
            self.server_.objects.pop(key, None)
        done = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in gone)
        self._answer(200, f"<DeleteResult>{done}</DeleteResult>".encode())

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        contents, common = [], set()
        for key, (data, at) in sorted(self.server_.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                common.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at))
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(_etag(data))}</ETag>"
                f"<Size>{len(data)}</Size></Contents>"
            )
        folders = "".join(f"<CommonPrefixes><Prefix>{escape(c)}</Prefix></CommonPrefixes>" for c in sorted(common))
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(contents)}{folders}</ListBucketResult>"
        self._answer(200, body.encode(), Content_Type="application/xml")


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
