"""The server of the explorer: the page and its JSON endpoints, on this machine only.

The standard library is enough: two kinds of requests, one user, nothing to configure.

A page of another site must not reach the model through the browser of the user. The server listens on 127.0.0.1. It
refuses a Host that is not this machine (a name that an attacker points to 127.0.0.1), an Origin other than its own, and
requests for answers that the browser marks as coming from another site. Requests are JSON of bounded size.
"""

from __future__ import annotations

import json
import traceback
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import torch

from hmmlm.errors import InputError
from hmmlm.explorer.endpoints import answer
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.page import CONTENT_TYPES, FILES, index_page

ADDRESS = "127.0.0.1"
PORT = 8765
HOSTS = ("127.0.0.1", "localhost")
MAX_BODY = 1 << 18  # bytes: 10,000 characters of any kind, escaped
TIMEOUT_S = 30  # of a silent connection
SAMPLERS = 4  # threads that sample, and compile constraints
ONE_THREAD = 1024  # most states of a model whose operations are too short for several threads of torch
"""They would wait for each other, for seconds where other programs use the processors: the browser does."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)
NOTEBOOKS = "http://127.0.0.1:* http://localhost:* https://localhost:* vscode-webview:"


class Server(ThreadingHTTPServer):
    """Answers requests about one model: samples in several threads, as a constraint may take seconds to compile.

    All other queries run one after another, in one thread.
    """

    daemon_threads = True

    def __init__(self, explorer: Explorer, port: int = PORT, framed: bool = False) -> None:
        """Listen on `port`, or on a free one if that is taken; `framed`: pages of this machine may frame the page."""
        self.explorer, self.closed = explorer, False
        self.policy = POLICY.format(ancestors=NOTEBOOKS if framed else "'none'")
        # One thread: torch keeps its own threads for each thread that uses it.
        threads = 1 if explorer.lm.hmm.num_states <= ONE_THREAD else torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "query", torch.set_num_threads, (threads,))
        self.sampler = ThreadPoolExecutor(SAMPLERS, "sample", torch.set_num_threads, (threads,))
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError:
            super().__init__((ADDRESS, 0), Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def start(self) -> Server:
        """Serve in a background thread; return the server itself."""
        Thread(target=self.serve_forever, name="server", daemon=True).start()
        return self

    def server_close(self) -> None:
        self.closed = True
        super().server_close()
        for pool in (self.worker, self.sampler):
            pool.shutdown(wait=False, cancel_futures=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the browser closes."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "hmmlm"
    sys_version = ""
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_local():
            return
        if path == "/":
            self._send(HTTPStatus.OK, index_page(), CONTENT_TYPES["html"])
        elif path.removeprefix("/") in FILES:
            name = path.removeprefix("/")
            self._send(HTTPStatus.OK, FILES[name], CONTENT_TYPES[name.rpartition(".")[2]])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {path}: the page is at /")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        if not self._is_local() or not self._is_own_page():
            return
        name = self.path.removeprefix("/api/")
        if name == self.path:
            self._refuse(HTTPStatus.NOT_FOUND, "questions are sent to /api/NAME")
            return
        fields = self._read_fields()
        if fields is None:
            return
        try:
            pool = self.server.sampler if name == "generate" else self.server.worker
            found = pool.submit(answer, self.server.explorer, name, fields).result()
            content = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (InputError, UnicodeEncodeError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            if self.server.closed:
                self.close_connection = True
            else:
                self._fail(error)
        else:
            self._send(HTTPStatus.OK, content, CONTENT_TYPES["json"])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what the library does not read: other methods, and what is not HTTP."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "send GET for the page, or POST for its questions")
        else:
            status = HTTPStatus(code)
            self._refuse(status, f"the request cannot be read: {message or status.phrase}")

    def _fail(self, error: Exception) -> None:
        """Report a bug: the traceback on the terminal, a sentence on the page."""
        traceback.print_exception(error)
        self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error: the terminal of the server has the details")

    def _is_local(self) -> bool:
        """Return whether a request is for this machine and not from a page elsewhere; refuse it otherwise."""
        if self.server.closed:  # on a connection that was kept open: the page notices that it ends
            self.close_connection = True
            return False
        host = self.headers.get("Host", "")
        name, _, port = host.partition(":")
        if name.lower() not in HOSTS or not ((port.isascii() and port.isdigit()) or not port):
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers requests to 127.0.0.1 and localhost only")
            return False
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page only")
            return False
        return True

    def _is_own_page(self) -> bool:
        """Return whether a question comes from the page itself, or from no page; refuse it otherwise."""
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page only")
            return False
        # A form of another site can send text, but not JSON without asking first, which is refused.
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are JSON: send Content-Type: application/json")
            return False
        return True

    def _read_fields(self) -> Any:
        """Return the JSON of a request; refuse it and return None if it has no length, is too long or is not JSON."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "send Content-Length")
            return None
        if len(length) > 9 or int(length) > MAX_BODY:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MAX_BODY:,} bytes")
            return None
        try:
            fields = json.loads(self.rfile.read(int(length)).decode())
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "the question is not a JSON object")
            return None
        return fields

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        # What was not read of a request must not be taken for the next one.
        self.close_connection = True
        reason = reason.encode(errors="backslashreplace").decode()
        self._send(status, json.dumps({"error": reason}, ensure_ascii=False).encode(), CONTENT_TYPES["json"])

    def _send(self, status: HTTPStatus, content: bytes, content_type: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        if self.close_connection:
            headers["Connection"] = "close"
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD, POST"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a request is not news."""
