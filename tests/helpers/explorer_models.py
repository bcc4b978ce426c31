"""Models and servers for the tests of the explorer."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from helpers.commands import write_corpus
from helpers.oracle import random_blocked_hmm
from hmmlm.cli.main import main
from hmmlm.data.words import WordTokenizer
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.server import Server
from hmmlm.lm.lm import LanguageModel

SMALL = ["--model.num-states", "12", "--batches.batch-size", "4", "--batches.length", "16", "--train.epochs", "3"]
HOSTILE = (
    "the <script>document.title='x'</script> שלום עולם cat 😀👩\u200d👩\u200d👧 <img src=x onerror=alert(1)> & "
    '"quotes" \u202eabc'
)


def train_run(folder: Path, *options: str) -> Path:
    """Train a small model on short sentences; return the folder of the run."""
    corpus = write_corpus(folder / "animals.txt")
    argv = ["train", "--data", str(corpus), *SMALL, "--no-train.tensorboard", "--quiet", *options]
    assert main([*argv, "--out", str(folder / "run")]) == 0
    return folder / "run"


def blocked_model(states: int = 4096) -> LanguageModel:
    """Return a model with 64 blocks of states."""
    words = ["<unk>", "<eos>", "the", "cat", *(f"word{i}" for i in range(196))]
    hmm = random_blocked_hmm(64, states // 64, len(words), seed=0, sharpness=2.0).to(torch.float32)
    return LanguageModel(hmm, WordTokenizer(words))


@contextmanager
def serving(explorer: Explorer, **options: Any) -> Iterator[Server]:
    """Serve a page while the block runs."""
    server = Server(explorer, port=0, **options).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def request(
    server: Server, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with given headers (Content_Type is Content-Type); return status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def post(server: Server, name: str, fields: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Ask an endpoint; return the status and the answer."""
    kind = headers.pop("Content_Type", "application/json")
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    status, _, content = request(server, "POST", f"/api/{name}", body, Content_Type=kind, **headers)
    return status, json.loads(content)
