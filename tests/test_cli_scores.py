"""Commands about scores: eval, score, compare, runs and ngram; `latest`, `--device`, `--quiet`, and named corpora."""

import io
import json
import math
import random
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import failure, help_text, write_corpus
from test_cli_main import SMALL

from hmmlm.baselines.ngram import NgramModel
from hmmlm.cli.main import main
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.corpora import Documents
from hmmlm.lm.lm import load
from hmmlm.ops import pieces
from hmmlm.report.results import count_ngram, evaluate_run
from hmmlm.training import prepare
from hmmlm.training.prepare import reopen

RUNNING = ["--no-batches.reset-at-eos", "--no-batches.eval-reset-at-eos"]


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must succeed; return what it prints."""
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a user with a text and three runs, of which runs/subwords is the newest."""
    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder / "animals.txt")
    (folder / "strange.txt").write_text("the cat sees the unicorn .\nthe dog likes the bird .\n")
    kinds = {
        "words": ["--tokenizer.min-count", "1", "--tokenizer.vocab-size", "15"],
        "running": RUNNING,
        "subwords": ["--tokenizer.kind", "bpe", "--tokenizer.vocab-size", "270"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, options in kinds.items():
            options = [*options, *SMALL, "--train.epochs", "1", "--quiet", "--out", f"runs/{name}"]
            assert main(["train", "--data", "animals.txt", *options]) == 0
    return folder


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


# --- figures ---


@pytest.mark.parametrize("run", ["words", "running"])
def test_eval_prints_figures_that_can_be_compared(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(output(capsys, "eval", f"runs/{run}", "--data", "strange.txt", "--json"))
    figures = result["results"]["strange.txt"]
    lm, text = load(f"runs/{run}"), Path("strange.txt").read_text()
    lines = text.splitlines()
    # A model that carries its state through <eos> reads the file as one sequence.
    sequences = [lm.encode(line) for line in lines] if run == "words" else [lm.encode(text)]
    each = [lm.hmm.token_log_probs([sequence])[0] for sequence in sequences]
    known = torch.cat([p[torch.tensor(s) != lm.tokenizer.unk_id] for p, s in zip(each, sequences, strict=True)])
    assert figures["log_likelihood"] == pytest.approx(float(torch.cat(each).sum()), rel=1e-5)
    assert len(known) < figures["tokens"]
    assert figures["perplexity_without_unknown"] == pytest.approx(math.exp(-float(known.mean())), rel=1e-4)
    assert figures["bits_per_byte"] == pytest.approx(-figures["log_likelihood"] / math.log(2) / len(text.encode()))
    assert 2 ** figures["bits_per_token"] == pytest.approx(figures["perplexity"])


def test_unknown_words_cause_a_warning_that_names_subwords(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/words", "--data", "strange.txt"]) == 0
    printed = capsys.readouterr()
    assert "strange.txt" in printed.out.splitlines()[-1] and "split" not in printed.out
    assert "of the words of strange.txt are unknown" in printed.err and "--tokenizer.kind bpe" in printed.err
    assert main(["eval", "runs/subwords", "--data", "strange.txt"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_training_prints_the_share_of_unknown_words_and_the_report_has_all_figures(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words = [*SMALL, "--train.epochs", "1", "--out", str(tmp_path / "run")], ["--tokenizer.vocab-size", "6"]
    for dry in ([], ["--dry-run"]):
        said = failure(capsys, "train", "--data", "animals.txt", *options, *words, *dry)
        assert "of the held-out words would be unknown" in said and "use --tokenizer.kind bpe" in said
    assert not (tmp_path / "run").exists()
    assert main(["data", "animals.txt", *words, "--out", str(tmp_path / "tokens")]) == 0
    assert main(["train", "--data", str(tmp_path / "tokens"), *options]) == 0
    printed = capsys.readouterr()
    assert (
        "unknown, perplexity of the HMM without them" in printed.out and "of the words of the test text" in printed.err
    )
    assert "device cpu; " in printed.out and " parameters; vocabulary 6; " in printed.out
    assert "GB of memory" in printed.out and "train perplexity" in printed.out and "loss" not in printed.out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["model"]["test"]["unknown_share"] > 0.3
    perplexities = {name: scores["valid"]["perplexity"] for name, scores in results.items()}
    assert perplexities["HMM + 5-gram"] <= 1.001 * min(perplexities["model"], perplexities["5-gram"])
    assert 0 <= results["HMM + 5-gram"]["hmm_weight"] <= 1
    page = (tmp_path / "run" / "report.html").read_text()
    for scores in results.values():
        assert f"{scores['test']['perplexity_without_unknown']:,.1f}" in page
        assert f"{scores['test']['bits_per_byte']:.3f}" in page


@pytest.mark.slow
def test_training_without_data_names_the_embedded_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [[line] for line in Path("animals.txt").read_text().splitlines()]
    splits = {split: Documents("lines", lambda: lines) for split in ("train", "valid", "test")}
    monkeypatch.setattr(prepare, "load_text", lambda *args, **options: splits)
    options = [*SMALL, "--train.epochs", "1"]
    assert "no --data: training on the embedded corpus" in output(
        capsys, "train", *options, "--out", str(tmp_path / "one")
    )
    options += ["--data", "embedded", "--out", str(tmp_path / "two")]
    assert "no --data" not in output(capsys, "train", *options)


def test_a_named_corpus_brings_its_tokenization() -> None:
    for name, size in (("ptb", 10_000), ("wikitext-2", 33_278)):
        tokenizer = read_config(RunConfig, {"data": name}).tokenizer
        assert (tokenizer.split, tokenizer.vocab_size) == ("whitespace", size)
    given = {"data": "ptb", "tokenizer": {"split": "words", "vocab_size": 7}}
    assert read_config(RunConfig, given).tokenizer.model_dump(include={"split", "vocab_size"}) == given["tokenizer"]
    assert read_config(RunConfig, {"data": "ptb", "tokenizer": {"kind": "bpe"}}).tokenizer.kind == "bpe"
    for given, kind in (
        ({"data": "my.txt"}, "auto"),
        ({}, "word"),
        ({"data": "my.txt", "tokenizer": {"split": "words"}}, "word"),
    ):
        assert read_config(RunConfig, given).tokenizer.kind == kind


def test_data_does_not_split_the_words_of_ptb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = {split: Documents("lines", lambda: [["it 's n't an <unk> u.s. $ N"]]) for split in prepare.SPLITS}
    monkeypatch.setattr(prepare, "load_text", lambda *args, **options: splits)
    output(capsys, "data", "ptb", "--out", str(tmp_path / "tokens"))
    assert len(reopen(tmp_path / "tokens").tokens["train"]) == 9


# --- score ---


@pytest.mark.parametrize("run", ["words", "subwords"])
def test_score_of_lines_and_tokens(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    lm, lines = load(f"runs/{run}"), Path("strange.txt").read_text().splitlines()
    rows = [
        json.loads(row)
        for row in output(capsys, "score", f"runs/{run}", "strange.txt", "--tokens", "--format", "json").splitlines()
    ]
    assert [row["text"] for row in rows] == lines and [row["line"] for row in rows] == [1, 2]
    assert [row["log_prob"] for row in rows] == pytest.approx(lm.score(lines).tolist(), rel=1e-5)
    for row, line in zip(rows, lines, strict=True):
        assert [token for token, _ in row["token_log_probs"]] == [lm.tokenizer.token(i) for i in lm.encode(line)]
        assert sum(p for _, p in row["token_log_probs"]) == pytest.approx(row["log_prob"], rel=1e-5)
        assert row["perplexity"] == pytest.approx(lm.perplexity([line]), rel=1e-4)
    header, *table = output(capsys, "score", f"runs/{run}", "strange.txt", "--format", "tsv").splitlines()
    assert header.split("\t") == ["line", "log_prob", "tokens", "perplexity", "unknown", "text"]
    assert [line.split("\t")[5] for line in table] == lines
    header, *table = output(capsys, "score", f"runs/{run}", "strange.txt", "--format", "tsv", "--tokens").splitlines()
    assert header.split("\t") == ["line", "position", "log_prob", "token"]
    assert len(table) == sum(row["tokens"] for row in rows)


def test_score_of_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "the cat sees the dog .\n\nthe dog\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    rows = output(capsys, "score", "latest", "-").splitlines()
    assert [row.split(maxsplit=4)[4:] for row in rows[1:-1]] == [["the cat sees the dog ."], [], ["the dog"]]
    assert rows[-1].endswith("all lines")
    perplexity = load("runs/subwords").perplexity(["the cat sees the dog .", "the dog"])
    assert float(rows[-1].split()[2].replace(",", "")) == pytest.approx(perplexity, abs=0.06)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nd\xe9j\xe0\n")))
    assert "standard input is not UTF-8 text: 0xe9 at byte 3" in failure(capsys, "score", "latest", "-")
    assert "no file nothing.txt" in failure(capsys, "score", "latest", "nothing.txt")


@pytest.mark.parametrize("lines", ["the cat\n\n \t\nthe dog .\n\n", "\n\nthe cat", "a\n" * 3])
def test_score_and_eval_agree_on_every_text(lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(lines)
    argv = ["runs/words", str(tmp_path / "text.txt")]
    rows = [json.loads(row) for row in output(capsys, "score", *argv, "--format", "json").splitlines()]
    assert [(row["line"], row["text"]) for row in rows] == list(enumerate(map(str.strip, lines.splitlines()), 1))
    figures = json.loads(output(capsys, "eval", argv[0], "--data", argv[1], "--json"))["results"]["text.txt"]
    assert sum(row["tokens"] for row in rows) == figures["tokens"]
    assert sum(row["log_prob"] for row in rows) == pytest.approx(figures["log_likelihood"])
    blank = {"log_prob": 0.0, "tokens": 0, "perplexity": None, "unknown": 0}
    assert all(blank.items() <= row.items() for row in rows if not row["text"])
    for options in ([], ["--tokens"]):  # as many columns in every row
        table = output(capsys, "score", *argv, "--format", "tsv", *options).splitlines()
        assert len({row.count("\t") for row in table}) == 1


def test_a_text_longer_than_a_batch_is_read_in_windows() -> None:
    lm = load("runs/running")
    texts = [lm.encode("the cat sees the dog .\n" * n) for n in (1, 9, 3)]
    whole = lm.token_log_probs(texts)
    with pieces.limit(10 * lm.hmm.num_states):
        parts = lm.token_log_probs(texts)
    for part, expected in zip(parts, whole, strict=True):
        assert torch.allclose(part, expected, atol=1e-4)


# --- compare, runs, latest ---


def test_compare_reports_a_paired_difference_with_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(output(capsys, "compare", "runs/words", "runs/subwords", "--data", "animals.txt", "--json"))
    lines = Path("animals.txt").read_text().splitlines()
    first, second = (load(f"runs/{name}").score(lines).double().numpy() for name in ("words", "subwords"))
    sizes = np.array([len(line) + 1 for line in lines])
    mean = (second - first).sum() / sizes.sum() / math.log(2)
    difference = result["bits_per_byte_difference"]
    assert difference["mean"] == pytest.approx(mean, rel=1e-4)
    # The normal interval of a ratio of means.
    residual = (second - first) / math.log(2) - mean * sizes
    half = 1.96 * residual.std(ddof=1) * math.sqrt(len(lines)) / sizes.sum()
    assert (difference["low"], difference["high"]) == pytest.approx((mean - half, mean + half), abs=0.2 * half)
    assert result["first_better_share"] == pytest.approx((first > second).mean())
    assert "perplexity_ratio" not in result  # the vocabularies differ


def test_compare_without_data_uses_the_test_text_of_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    printed = output(capsys, "compare", "runs/running", "runs/running")
    assert "+0.0000 bits per token (95% interval +0.0000 to +0.0000)" in printed
    assert "perplexity of A / B: 1.0000" in printed and "no clear difference" in printed
    assert "bits per byte" in output(capsys, "compare", "runs/words", "latest")
    assert "do not have the vocabulary" in failure(capsys, "compare", "runs/words", "latest", "--data", "runs/words")


@pytest.mark.parametrize("data", [[], ["--data", "animals.txt"]])
def test_compare_reads_a_text_as_eval_does(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Through a chain that continues, the context of a line includes the lines before it."""
    (evaluated,) = json.loads(output(capsys, "eval", "runs/running", *data, "--json"))["results"].values()
    compared = json.loads(output(capsys, "compare", "runs/running", "runs/running", *data, "--json"))["models"][0]
    for name, value in evaluated.items():
        assert compared[name] == pytest.approx(value, rel=1e-5), name


def test_reports_and_ngrams_count_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(output(capsys, "ngram", "runs/words", "--order", "5", "--json"))
    report = evaluate_run(Path("runs/words")).baselines["5-gram"]["test"]
    assert printed["results"]["test"]["perplexity"] == pytest.approx(report.perplexity)


def test_ngrams_of_a_large_text_count_its_first_tokens() -> None:
    data = reopen(Path("runs/words"))
    tokens, words = {split: np.asarray(file.tokens) for split, file in data.tokens.items()}, data.tokenizer
    expected = NgramModel(tokens["train"][:60], words.vocab_size, 5, words.eos_id)
    found = count_ngram(data, 5, True, most=60)
    assert np.array_equal(found.log_probs(tokens["test"]), expected.log_probs(tokens["test"]))


def test_runs_lists_results_and_latest_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = output(capsys, "runs").splitlines()
    assert rows[0].split() == ["run", "data", "model", "valid", "test", "unknown", "progress"]
    assert [row.split()[0] for row in rows[1:]] == ["runs/words", "runs/running", "runs/subwords"]
    assert max(map(len, rows)) <= 80
    newest = json.loads(output(capsys, "runs", "--json"))[-1]
    test = json.loads(output(capsys, "eval", "latest", "--json"))["results"]["test"]
    assert newest["test_perplexity"] == pytest.approx(test["perplexity"], rel=1e-5)
    assert newest["finished"] and newest["states"] == 4 and newest["data"] == "animals.txt"
    for argv in ("sample latest --num-samples 1", "infill latest", "inspect latest"):
        output(capsys, *shlex.split(argv), *(["the ___"] if argv.startswith("infill") else []))
    teacher = ["--model.hidden", "8", "--model.layers", "1", "--model.heads", "1", "--train.epochs", "1", "--quiet"]
    output(capsys, "teacher", "--data", "animals.txt", "--out", "runs/teacher", *teacher)
    baseline = ["--model.hidden", "8", "--train.epochs", "1", "--quiet"]
    output(capsys, "baseline", "--data", "animals.txt", "--out", "baselines/lstm", *baseline)
    (tmp_path / "results.json").write_bytes(Path("runs/words/results.json").read_bytes())
    Path("runs/words/results.json").unlink()  # as while the test text is scored
    found = {run["run"]: run for run in json.loads(output(capsys, "runs", "--json"))}
    progress = {row.split()[0]: row.rstrip().rpartition("  ")[2] for row in output(capsys, "runs").splitlines()[1:]}
    Path("runs/words/results.json").write_bytes((tmp_path / "results.json").read_bytes())
    assert [*found] == ["runs/words", "runs/running", "runs/subwords", "runs/teacher", "baselines/lstm"]
    assert progress == {name: "not tested yet" if name == "runs/words" else "finished" for name in found}
    assert [run["finished"] for run in found.values()] == [False, True, True, True, True]
    test = json.loads(output(capsys, "eval", "baselines/lstm", "--json"))["results"]["test"]
    assert found["baselines/lstm"]["test_perplexity"] == pytest.approx(test["perplexity"], rel=1e-5)
    assert "a network is not an HMM" in failure(capsys, "sample", "baselines/lstm", "--must", "cat")
    output(capsys, "compare", "baselines/lstm", "latest")  # not the teacher, which is newer
    monkeypatch.chdir(tmp_path)
    assert "no runs in the folder runs" in failure(capsys, "eval", "latest")
    assert "no runs in the folder runs" in failure(capsys, "runs")


def test_a_finished_run_says_that_it_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    printed = output(capsys, "train", "--resume", "latest")
    assert "run folder: runs/subwords" in printed
    assert "this run is complete (1 epoch): --train.epochs N trains it longer" in printed


def test_quiet_prints_results_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--train.epochs", "1", "--quiet", "--out", str(tmp_path / "run")]
    lines = output(capsys, "train", "--data", "animals.txt", *options).splitlines()
    assert [line.split()[0] for line in lines] == ["finished", "test", "report:"]


# --- devices, help ---


@pytest.mark.parametrize("argv", ["eval", "sample", "infill ___", "inspect", "score strange.txt", "compare latest"])
def test_every_command_that_uses_a_model_takes_a_device(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *rest = argv.split()
    output(capsys, command, "latest", *rest, "--device", "cpu")
    if not torch.cuda.is_available():
        assert "no CUDA device" in failure(capsys, command, "latest", *rest, "--device", "cuda")


def test_usage_names_the_positional_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in {
        "eval": "MODEL",
        "sample": "MODEL",
        "infill": "MODEL TEXT",
        "inspect": "MODEL",
        "score": "MODEL FILE",
        "compare": "FIRST SECOND",
        "data": "CORPUS",
        "ngram": "DATA",
    }.items():
        assert help_text(capsys, command, "--help").startswith(f"usage: hmmlm {command} {usage} [OPTIONS]\n")


def test_infill_without_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    with_unknown = dict(load("runs/words").infill("the ___ sees", 15)[0])
    rows = output(capsys, "infill", "runs/words", "the ___ sees", "--top", "15", "--no-allow-unk").splitlines()[1:]
    found = {row.split()[-2]: float(row.split()[-1]) for row in rows}
    assert "<unk>" in with_unknown and "<unk>" not in found
    assert found["cat"] == pytest.approx(with_unknown["cat"] / (1 - with_unknown["<unk>"]), abs=1e-4)


# --- n-grams ---


@pytest.mark.parametrize("run", ["words", "running", "subwords"])
def test_ngrams_are_written_as_arpa_and_read_back(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ngram", f"runs/{run}", "--json"]
    written = json.loads(output(capsys, *argv, "--order", "3", "--out", str(tmp_path / "3.arpa")))
    read = json.loads(output(capsys, *argv, "--arpa", str(tmp_path / "3.arpa")))
    message = "3.arpa has n-grams of up to 3 tokens: leave out --order"
    assert message in failure(capsys, *argv, "--arpa", str(tmp_path / "3.arpa"), "--order", "5")
    for split in ("valid", "test"):
        assert read["results"][split] == pytest.approx(written["results"][split], rel=1e-9)
    assert "bits per" in output(capsys, "ngram", f"runs/{run}", "--order", "2")
    assert "is not an ARPA file" in failure(capsys, *argv, "--arpa", "animals.txt")
    assert "has no token files" in failure(capsys, "ngram", str(tmp_path))


# --- text, progress, installation ---


def test_a_run_as_data_may_be_the_latest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--data", "latest", *SMALL, "--train.epochs", "1", "--quiet", "--out", str(tmp_path / "run")]
    output(capsys, *argv)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == "runs/subwords"


def test_clustering_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output(capsys, "data", "animals.txt", "--out", str(tmp_path / "tokens"), "--clusters", "4")
    assert "clustering into 4: 17 of 17 words" in printed
    assert output(capsys, "data", "animals.txt", "--out", str(tmp_path / "more"), "--quiet").startswith("split")


def test_tables_fit_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = ["inspect --contexts", "eval --splits train,valid,test", "compare latest"]
    for command, *rest in map(str.split, commands):
        lines = output(capsys, command, "runs/words", *rest).splitlines()
        assert max(map(len, lines)) <= 80, command
    contexts = output(capsys, "inspect", "runs/words", "--contexts", "--text", "the unicorn").splitlines()
    begin = next(i for i, line in enumerate(contexts) if "before" in line)
    assert contexts[begin + 1][:2].strip().isdigit()  # the number of the state
    assert any(line.startswith("perplexity") and "1 unknown word" in line for line in contexts)


def test_damaged_results_and_ngrams_and_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ngram", "runs/words", "--order", "2", "--out", str(tmp_path / "2.arpa")]) == 0
    text = (tmp_path / "2.arpa").read_text()
    (tmp_path / "bad.arpa").write_text(re.sub(r"(?m)^-[0-9.]+\t", "5\t", text))
    assert "is not a 1-gram" in failure(capsys, "ngram", "runs/words", "--arpa", str(tmp_path / "bad.arpa"))
    assert "--threads" in failure(capsys, "eval", "runs/words", "--threads", "50000")
    results = Path("runs/words/results.json")
    before = results.read_text() if results.exists() else None
    try:
        results.write_text('{"model": {"test": 5}}')
        assert main(["runs"]) == 0
    finally:
        results.write_text(before) if before is not None else results.unlink()


def test_labels_name_the_states_and_tags_are_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    kinds = [[2, 0, 1, 2, 0][: rng.choice([3, 5])] for _ in range(400)]
    words = {2: ["the", "a", "this"], 0: ["cat", "dog", "fish"], 1: ["sees", "likes"]}
    Path("my.txt").write_text("".join(" ".join(rng.choice(words[k]) for k in line) + "\n" for line in kinds))
    known = [" ".join(str(k) if rng.random() < 0.5 else "_" for k in line) for line in kinds]
    Path("known.txt").write_text("\n".join(known) + "\n")
    train = ["train", "--data", "my.txt", "--model.kind", "scalar", "--model.num-states", "4", "--quiet"]
    train += ["--optimizer.kind", "baum-welch", "--optimizer.full-batch", "--labels"]
    assert main([*train, "known.txt", "--out", "run", "--train.epochs", "10"]) == 0
    capsys.readouterr()
    assert main(["inspect", "run", "--tags", "my.txt"]) == 0
    tags = capsys.readouterr().out
    assert [line.split() for line in tags.splitlines()] == [[str(k) for k in line] for line in kinds]
    Path("tags.txt").write_text(tags)
    assert main([*train, "tags.txt", "--out", "again", "--train.epochs", "1"]) == 0
    for labels, message in (
        (known[:-1], "known.txt has fewer lines than my.txt"),
        ([*known[:-1], "0 " * 9], "known.txt, line 400: 9 labels for"),
        (
            [*known[:-1], " ".join("4" * len(kinds[-1]))],
            "line 400: '4' is no label: give the number of a state, 0 to 3",
        ),
    ):
        Path("known.txt").write_text("\n".join(labels) + "\n")
        capsys.readouterr()
        assert main([*train, "known.txt", "--out", "wrong"]) == 2
        assert message in capsys.readouterr().err
        assert not Path("wrong").exists()
