"""Model files are not trusted: bad numbers, shapes, types and JSON are refused at load, by file and tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import failure, python_environment
from helpers.runs import random_hmm
from safetensors.torch import load_file, save_file
from torch import Tensor

import hmmlm
from hmmlm.baselines.neural import LstmConfig, load_baseline
from hmmlm.data.tensorfiles import read_tensors, write_tensors
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.models.neural import Neural
from hmmlm.ops import pieces
from hmmlm.scan.composition import with_tensors
from hmmlm.structure.blocks import Blocks
from hmmlm.teachers.gpt import GPT, GPTShape
from hmmlm.teachers.teacher import open_teacher

WORDS = ["<unk>", "<eos>", "a", "b", "c", "d"]
DEEP = "[" * 100_000


def blocked_hmm(hidden: int = 4) -> HMM:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 0, 1, 0, 1]), 4)
    return Neural(blocks, hidden=hidden, generator=torch.Generator().manual_seed(0))().detach()


def save(folder: Path, hmm: HMM) -> Path:
    config = {"data": "x.txt", "batches": {"kind": "stream", "batch_size": 3, "length": 8, "eval_reset_at_eos": True}}
    LanguageModel(hmm, WordTokenizer(WORDS), config).save(folder)
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save(tmp_path / "dense", random_hmm(4, 6, seed=1, dtype=torch.float32))


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    return save(tmp_path / "blocked", blocked_hmm())


def first_entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


NOT_A_NUMBER, INFINITE = first_entry(float("nan")), first_entry(float("inf"))
CHANGES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    name: {
        "nan": NOT_A_NUMBER,
        "infinite": INFINITE,
        "not normalized": lambda x: x + 1.0,
        "slightly off": lambda x: x + 0.001,
        "all -inf": lambda x: torch.full_like(x, -torch.inf),
        "another dtype": lambda x: x.double(),
        "half precision": lambda x: x.half(),
        "integers": lambda x: x.long(),
        "another rank": lambda x: x[None],
        "too narrow": lambda x: x[..., :-1],
        "too short": lambda x: x[:-1],
        "a number": lambda x: x.sum(),
        "empty": lambda x: x[:0],
    }
    for name in ("log_start", "transition.log_probs", "emission.log_probs")
}
BLOCKED_CHANGES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "emission.block_of_word": {
        "float": lambda x: x.float(),
        "another rank": lambda x: x[None],
        "too short": lambda x: x[:-1],
        "a block that does not exist": lambda x: x + 1,
        "negative": lambda x: x - 1,
        "another block of a word": first_entry(1),
    },
    "emission.log_probs": CHANGES["emission.log_probs"],
    "log_start": CHANGES["log_start"],
    **{
        name: {
            "nan": NOT_A_NUMBER,
            "infinite": INFINITE,
            "another size": lambda x: 2 * x + 1,
            "another dtype": lambda x: x.double(),
            "another rank": lambda x: x[None],
            "too narrow": lambda x: x[..., :-1],
        }
        for name in ("transition.u", "transition.w", "transition.log_normalizer")
    },
}


def change_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    found, metadata = read_tensors(folder / "model.safetensors")
    tensors = {key: tensor.clone() for key, tensor in found.items()}  # tensors that are read are mapped to the file
    save_file({**tensors, name: change(tensors[name]).contiguous()}, folder / "model.safetensors", metadata)


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        hmmlm.load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1_000
    return str(error.value)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, changes in CHANGES.items() for kind in changes])
def test_bad_tensors_of_a_dense_model_are_refused(dense: Path, name: str, kind: str) -> None:
    change_tensor(dense, name, CHANGES[name][kind])
    message = refusal(dense)
    assert str(dense / "model.safetensors") in message
    assert name in message or (kind == "another dtype" and name == "log_start")  # then it is the others that differ


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, changes in BLOCKED_CHANGES.items() for kind in changes]
)
def test_bad_tensors_of_a_blocked_model_are_refused(blocked: Path, name: str, kind: str) -> None:
    change_tensor(blocked, name, BLOCKED_CHANGES[name][kind])
    message = refusal(blocked)
    assert str(blocked / "model.safetensors") in message
    if kind not in ("another dtype", "another block of a word"):  # which changes what emission.log_probs sums to
        # factors are checked together: the message names them all, or the one that does not fit another
        together = ("transition.w must have shape", "by u, w and log_normalizer")
        assert name in message or (name.startswith("transition.") and any(each in message for each in together))


@pytest.fixture
def every_second_row() -> Iterator[None]:
    """Validate every second row of the transition matrix, as those of large matrices."""
    with pieces.limit(32):
        yield


@pytest.mark.usefixtures("every_second_row")
def test_rows_of_a_large_transition_matrix_are_sampled() -> None:
    hmm = blocked_hmm()
    factors = hmm.transition.tensors()
    hmm.validate()
    for row, noticed in ((2, True), (1, False)):
        normalizer = factors["log_normalizer"].clone()
        normalizer[row] += 1
        changed = with_tensors(hmm, {"transition.log_normalizer": normalizer})
        if noticed:
            with pytest.raises(InputError, match=r"transition from state 2 .* sums to 0\.36"):
                changed.validate()
        else:
            changed.validate()
    for wrong in (-100.0, 100.0):  # of a row between them, by far
        normalizer = factors["log_normalizer"].clone()
        normalizer[1] += wrong
        with pytest.raises(InputError, match=r"transition\.log_normalizer of state 1 is .*, but u and w allow .* to "):
            with_tensors(hmm, {"transition.log_normalizer": normalizer}).validate()


@pytest.mark.usefixtures("every_second_row")
def test_a_checksum_finds_what_the_other_checks_do_not(blocked: Path) -> None:
    """A normalizer, of a row that is not summed, wrong by two per cent; and a change within the tolerance of sums."""

    def scale_row(log_normalizer: Tensor) -> Tensor:
        changed = log_normalizer.clone()
        changed[1] *= 1.02
        return changed

    saved = (blocked / "model.safetensors").read_bytes()
    changes: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("transition.log_normalizer", scale_row),
        ("transition.u", lambda u: u * 1.000001),
    ]
    for name, change in changes:
        change_tensor(blocked, name, change)
        message = refusal(blocked)
        assert message.startswith(f"{blocked / 'model.safetensors'} is damaged: its tensors do not have the checksum")
        assert message.endswith("remove checksum from its metadata if they were changed on purpose")
        tensors, metadata = read_tensors(blocked / "model.safetensors")
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        del metadata["checksum"]
        write_tensors(blocked / "model.safetensors", tensors, metadata)  # as older versions did
        hmmlm.load(blocked)
        (blocked / "model.safetensors").write_bytes(saved)
    hmmlm.load(blocked)


def test_the_commands_refuse_before_any_answer(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensor(dense, "emission.log_probs", lambda x: x + 1)
    for command in (["eval"], ["sample"], ["inspect"], ["infill", "a ___ b"]):
        error = failure(capsys, command[0], str(dense), *command[1:])
        assert "model.safetensors: emission.log_probs row 0 sums to 2.71828, not to one (4 such rows)" in error
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in ("states", "vocab_size") for value in (None, "4", 4.0, True, -1, 0, [4], {}, 10**30)]
    + [(f"{role}.kind", value) for role in ("transition", "emission") for value in (None, 3, ["dense"], {"dense": 1})]
    + [("training", value) for value in ("x", [1], 3, {"batches": 3}, {"batches": {"length": "8"}})]
    + [("training", {"batches": {"eval_reset_at_eos": 1}}), ("training", {"batches": {"kind": ["stream"]}})]
    + [("training", value) for value in ({"batches": {"kind": "chunks", "length": 0}}, {"text": 5}, {"data": 5})]
    + [("training", {"text": {"unit": "zebra"}}), ("eos_id", 99), ("eos_id", "1")]
    + [("eos_id", value) for value in (True, 1.0)]
    + [("format", value) for value in ([], {}, None, 3)]
    + [("version", value) for value in ([], "2", None, True, 1.0, 2.0, 0, 3)]
    + [("tokenizer", value) for value in ([], 3, None)],
)
def test_wrong_types_in_the_configuration_are_refused(dense: Path, field: str, value: Any) -> None:
    path = dense / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    message = refusal(dense)
    assert str(dense) in message


def test_a_batch_of_nothing_is_refused(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = dense / "config.json", dense / "text.txt"
    text.write_text("a b\n")
    path.write_text(json.dumps({**json.loads(path.read_text()), "training": {"batches": {"length": 0}}}))
    error = failure(capsys, "eval", str(dense), "--data", str(text))
    assert "training.batches.length is 0, not a number of at least 1" in error


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_deeply_nested_json_is_refused(dense: Path, file: str) -> None:
    whole = (dense / file).read_text()
    for content in (DEEP, '{"a":' * 100_000, whole.rstrip()[:-1] + ', "more": ' + DEEP + "]" * 100_000 + "}"):
        (dense / file).write_text(content)
        assert f"{dense / file} is nested too deeply" in refusal(dense)


@pytest.mark.parametrize(
    ("field", "value"),
    [("words", value) for value in ("abc", 3, None, {}, [1, 2], [["a"]], [None])]
    + [("words", ["<unk>", "<eos>", "a", "a"]), ("words", ["a"])]
    + [("split", value) for value in (3, [], None, "other")]
    + [("lowercase", value) for value in ("no", 1, None, [])]
    + [("format", 3)]
    + [("version", value) for value in ([1], True, 1.0)],
)
def test_wrong_types_in_a_tokenizer_are_refused(dense: Path, field: str, value: Any) -> None:
    path = dense / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert str(path) in refusal(dense)


# --- networks ---


def save_baseline(folder: Path) -> Callable[[], Any]:
    tokenizer = WordTokenizer(WORDS)
    LstmConfig(hidden=4, layers=1).build(tokenizer, 0, None).save(folder, tokenizer)
    return lambda: load_baseline(folder)


def save_gpt(folder: Path) -> Callable[[], Any]:
    tokenizer = WordTokenizer(WORDS)
    GPT(GPTShape(len(WORDS), 4, 1, 1, 8), tokenizer.eos_id).save(folder, tokenizer)
    return lambda: open_teacher(str(folder), device="cpu")


@pytest.mark.parametrize("saved", [save_baseline, save_gpt])
def test_bad_networks_are_refused(saved: Callable[[Path], Callable[[], Any]], tmp_path: Path) -> None:
    load = saved(tmp_path)
    load()
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    header = json.loads(config.read_text())
    weight = tensors["embedding.weight"]
    for changed in (NOT_A_NUMBER(weight), INFINITE(weight), weight.double(), weight[:-1], weight[None]):
        write_tensors(file, {**tensors, "embedding.weight": changed})
        with pytest.raises(InputError, match=r"model\.safetensors: embedding\.weight"):
            load()
    write_tensors(file, {**tensors, "more.weight": weight})
    with pytest.raises(InputError, match=r"model\.safetensors: config\.json has no place for more\.weight"):
        load()
    write_tensors(file, tensors)
    for field in ("hidden", "layers"):
        for value in (10**9 * 4, 2, "4", None, 4.5, -1):  # sizes that the file does not have are not allocated
            config.write_text(json.dumps({**header, field: value}))
            with pytest.raises(InputError, match=r"config\.json|model\.safetensors"):
                load()
    config.write_text(DEEP)
    with pytest.raises(InputError, match=r"config\.json is nested too deeply|configuration .* cannot be loaded"):
        load()


# --- writing ---


def test_files_are_readable_as_the_umask_allows(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            folder = save(tmp_path / str(mask), random_hmm(4, 6, seed=1, dtype=torch.float32))
        finally:
            os.umask(before)
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {mode}


def test_tensors_survive_and_depend_on_their_content_alone(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 4).t(),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "bfloat16": torch.randn(3).bfloat16(),
    }
    metadata = {str(i): "x" for i in range(20)}
    write_tensors(tmp_path / "a", tensors, metadata)
    write_tensors(tmp_path / "b", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again, found = read_tensors(tmp_path / "a")
    assert found == metadata and again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor)


@pytest.mark.slow
def test_a_model_has_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    program = (
        "import sys, hmmlm; from hmmlm.data.tokenizers import WordTokenizer; from hmmlm.lm.lm import LanguageModel;"
        "hmm = hmmlm.HMM.from_probs([.5, .5], [[.5, .5], [.5, .5]], [[.2, .2, .6], [.1, .1, .8]]);"
        "LanguageModel(hmm, WordTokenizer(['<unk>', '<eos>', 'a'])).save(sys.argv[1])"
    )
    for name in "ab":
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], env=python_environment(), check=True)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
