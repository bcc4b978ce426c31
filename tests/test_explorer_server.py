"""The server of the explorer over HTTP: who may ask, how much, and what an answer carries."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from helpers.commands import python_environment
from helpers.explorer_models import HOSTILE, post, request, serving
from helpers.report_models import sentence_model

from hmmlm import Automaton, Constraint
from hmmlm.constrain.phrases import Phrases
from hmmlm.errors import InputError
from hmmlm.explorer import endpoints
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.page import FILES
from hmmlm.explorer.server import MAX_BODY, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Explorer(sentence_model())) as server:
        yield server


def test_the_page_and_its_files_are_served(server: Server) -> None:
    status, headers, content = request(server, "GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html") and content == FILES["index.html"]
    for name in re.findall(r'(?:src|href)="([\w.]+)"', content.decode()):
        status, headers, _ = request(server, "GET", f"/{name}")
        assert status == 200 and headers["X-Content-Type-Options"] == "nosniff", name
    assert {name for name in FILES if name.endswith(".js")} <= set(re.findall(r'src="([\w.]+)"', content.decode()))


def test_short_operations_do_not_wait_for_other_threads(server: Server) -> None:
    before = torch.get_num_threads()
    assert server.worker.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == before  # of this thread


def test_others_are_answered_while_a_constraint_compiles(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done, compile_text = Event(), Event(), Phrases.new_text

    def slow(self: Phrases, constraint: Constraint, begin: Sequence[int]) -> Automaton | None:
        if constraint.regex == "slow":
            begun.set()
            assert done.wait(60)
        return compile_text(self, constraint, begin)

    monkeypatch.setattr(Phrases, "new_text", slow)
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(post, server, "generate", {"constraints": {"regex": "slow"}})
        try:
            assert begun.wait(60)
            assert post(server, "sentence", {"text": "the cat"})[0] == 200
            assert post(server, "generate", {"constraints": {"regex": ".*"}})[0] == 200
            assert not waiting.done()
        finally:
            done.set()
        status, answer = waiting.result()
        assert status == 400 and "cannot spell a text that satisfies regex" in answer["error"]


def test_a_hard_constraint_is_refused_in_one_sentence(server: Server) -> None:
    status, answer = post(server, "generate", {"constraints": {"regex": "(a|b)*a(a|b){20}"}})
    assert status == 400 and re.fullmatch(
        r"the constraint needs more than [\d,]+ steps to compile: .*", answer["error"]
    )


def test_the_policy_allows_own_scripts_only(server: Server) -> None:
    _, headers, page = request(server, "GET", "/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert b"<script>" not in page and b" style=" not in page and b"onclick=" not in page
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["Cache-Control"] == "no-store"
    with serving(Explorer(sentence_model()), framed=True) as framed:  # in a notebook
        assert "frame-ancestors http://127.0.0.1:*" in request(framed, "GET", "/")[1]["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path", ["/../config.json", "/static/app.js", "/%2e%2e/x", "/server.py", "//etc/passwd", "/api/"]
)
def test_no_other_path_is_served(server: Server, path: str) -> None:
    status, _, content = request(server, "GET", path)
    assert status == 404 and "error" in json.loads(content)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "x:y"]
)
def test_other_hosts_are_refused(server: Server, host: str) -> None:
    """A page whose name was pointed to 127.0.0.1 (DNS rebinding) still sends its own name."""
    for method, path in (("GET", "/"), ("POST", "/api/model")):
        status, _, content = request(server, method, path, b"{}", Host=host, Content_Type="application/json")
        assert status == 403 and b"127.0.0.1 and localhost only" in content


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST"])
def test_this_machine_is_allowed_under_any_port(server: Server, host: str) -> None:
    """A forwarded port is another one here."""
    assert post(server, "model", {}, Host=host)[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", "file://"]
)
def test_other_origins_are_refused(server: Server, origin: str) -> None:
    status, answer = post(server, "model", {}, Origin=origin)
    assert status == 403 and "own page only" in answer["error"]
    assert request(server, "GET", "/", Origin=origin)[0] == 403


def test_requests_of_other_sites_are_refused(server: Server) -> None:
    port = server.server_address[1]
    assert post(server, "model", {}, Origin=f"http://127.0.0.1:{port}", Sec_Fetch_Site="same-origin")[0] == 200
    for site in ("cross-site", "same-site"):
        assert post(server, "model", {}, Sec_Fetch_Site=site)[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert post(server, "model", {}, Content_Type=kind)[0] == 415
    for method in ("OPTIONS", "PUT", "DELETE", "TRACE", "PROPFIND"):
        status, headers, content = request(server, method, "/api/model")
        assert status == 405 and "Access-Control-Allow-Origin" not in headers
        assert json.loads(content) == {"error": "send GET for the page, or POST for its questions"}
        assert headers["Allow"] == "GET, HEAD, POST" and headers["Connection"] == "close"


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/app.js", 200), ("/none", 404)])
def test_head_answers_as_get_without_a_body(server: Server, path: str, status: int) -> None:
    (got, got_headers, content), (head, head_headers, nothing) = (request(server, m, path) for m in ("GET", "HEAD"))
    assert got == head == status and not nothing
    assert {**got_headers, "Date": ""} == {**head_headers, "Date": ""}
    assert head_headers["Content-Length"] == str(len(content))
    assert request(server, "HEAD", path, Host="evil.example")[0] == 403


@pytest.mark.parametrize(
    ("line", "status"), [(b"GARBAGE", 400), (b"GET / HTTP/9.9", 505), (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", 414)]
)
def test_what_is_not_http_is_answered_with_one_sentence(server: Server, line: bytes, status: int) -> None:
    with socket.create_connection(server.server_address[:2], timeout=10) as connection:  # type: ignore[arg-type]
        connection.sendall(line + b"\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    head, _, content = answer.rpartition(b"\r\n\r\n")
    assert json.loads(content)["error"].startswith("the request cannot be read: ")
    assert not head or head.startswith(b"HTTP/1.1 %d " % status)  # the first version of HTTP has no headers


def test_sizes_are_bounded(server: Server) -> None:
    assert post(server, "sentence", {"text": "😀" * 10_000})[0] == 200
    status, answer = post(server, "sentence", {"text": "a" * 10_001})
    assert status == 400 and "10000 characters" in answer["error"]
    assert post(server, "sentence", b"x" * (MAX_BODY + 1))[0] == 413
    for length in ("-1", "x", "9" * 30, "१"):
        with socket.create_connection(server.server_address[:2], timeout=10) as connection:  # type: ignore[arg-type]
            head = "POST /api/model HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n{{}}".encode())
            assert re.match(rb"HTTP/1.1 4(11|13) ", connection.recv(100)), length


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b"[" * 100_000, b'{"text": NaN}'])
def test_bodies_that_are_not_objects_are_refused(server: Server, body: bytes) -> None:
    assert post(server, "sentence", body)[0] == 400


def test_text_survives_unchanged(server: Server) -> None:
    status, answer = post(server, "sentence", {"text": "the cat"})
    assert status == 200 and [token["text"] for token in answer["tokens"]] == ["the", "cat", "<eos>"]
    assert post(server, "sentence", {"text": HOSTILE})[0] == 200
    status, answer = post(server, "search", {"word": "<script>"})
    assert status == 200 and "<script>" in answer["problem"]
    assert post(server, "sentence", b'{"text": "\\ud800"}')[0] == 400


def test_a_bug_is_reported_without_details(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setitem(endpoints.ENDPOINTS, "model", endpoints.ENDPOINTS["model"]._replace(answer=fail))
    status, answer = post(server, "model", {})
    assert status == 500 and "secret" not in answer["error"] and "a secret" in capsys.readouterr().err
    monkeypatch.undo()
    assert post(server, "model", {})[0] == 200


def test_a_taken_port_is_replaced() -> None:
    explorer = Explorer(sentence_model())
    with serving(explorer) as first:
        second = Server(explorer, first.server_address[1])
        assert second.server_address[1] != first.server_address[1] and second.server_address[0] == "127.0.0.1"
        second.server_close()


def test_a_notebook_shows_a_frame(tmp_path: Path) -> None:
    display = sentence_model().explore(height=500)
    try:
        html = display._repr_html_()
        assert f'<iframe src="{display.url}"' in html and 'height="500"' in html
        display.export(tmp_path / "page.html")
        assert (tmp_path / "page.html").stat().st_size > 10_000
    finally:
        display.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(display.url.split(":")[2].strip("/"))), timeout=5)


@pytest.mark.slow
def test_a_process_may_end_while_the_map_is_computed(tmp_path: Path) -> None:
    sentence_model().save(tmp_path / "model")
    code = f"import hmmlm; hmmlm.load({str(tmp_path / 'model')!r}).explore()"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=python_environment(), capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    sentence_model().save(tmp_path / "model")
    command = [sys.executable, "-m", "hmmlm", "explore", str(tmp_path / "model"), "--port", "0", "--no-browser"]
    # A new group with the default handler: a shell's background process ignores Ctrl-C.
    process = subprocess.Popen(
        command,
        env=python_environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.fullmatch(r"model is at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C stops\)\n", line)
        assert address, line
        with socket.create_connection(("127.0.0.1", int(address[1])), timeout=30) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 0 and process.stdout.read() == "\nstopped\n"
    finally:
        process.kill()


def test_the_map_is_laid_out_once_asked(server: Server) -> None:
    server.explorer.layout.result(timeout=60)
    status, answer = post(server, "map", {})
    assert status == 200 and answer["ready"] and len(answer["states"]) == 4
    with pytest.raises(InputError):
        server.explorer.second.result()
    assert post(server, "compare", {"text": "the cat"})[0] == 400
