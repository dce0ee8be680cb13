"""An HTTP proxy in front of a real gateway, which loses, cuts or changes what passes: as a bad network would."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

#: What a fault does: "503" answers in place of the gateway; "drop" ends the connection before the request is passed on,
#: "lost" after the gateway has done it; "cut" and "flip" change the body of an answer.
FAULTS = ("503", "drop", "lost", "cut", "flip")
SECONDS = 60.0  # of one request to the gateway


class FaultyProxy:
    """``fault(method, key, number)`` says what goes wrong with a request; the number counts the requests of this method
    for this key, from 1 on. It may do something first, such as end the gateway."""

    def __init__(self, gateway: str) -> None:
        self.gateway = urlsplit(gateway).netloc
        self.fault: Callable[[str, str, int], str] = lambda method, key, number: ""
        self.requests: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            proxy = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _pass_on(self) -> None:
        key = unquote(urlsplit(self.path).path).partition("/")[2].partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.proxy.lock:
            self.proxy.requests[self.command, key] += 1
            number = self.proxy.requests[self.command, key]
            fault = self.proxy.fault(self.command, key, number)
        self.close_connection = True
        if fault == "503":
            self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
        if fault in ("503", "drop"):
            return
        try:
            connection = http.client.HTTPConnection(self.proxy.gateway, timeout=SECONDS)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # as they are: the signature covers some of them
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
        except (OSError, http.client.HTTPException):
            return  # the gateway is away: so is this connection
        if fault == "lost":
            return
        sent = data
        if fault == "cut":
            sent = data[: len(data) // 2]
        if fault == "flip" and data:
            at = len(data) * 2 // 3
            sent = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        skipped = ("content-length", "transfer-encoding", "connection")
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
        self._answer(answer.status, headers, sent, len(data))

    def _answer(self, status: int, headers: list[tuple[str, str]], sent: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(sent) if length is None else length))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on
