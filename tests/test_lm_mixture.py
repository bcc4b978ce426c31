"""Mixtures of models: they are distributions, sequential and whole scores agree, and commands work with them."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import failure, write_corpus
from helpers.oracle import random_blocked_hmm, random_hmm
from test_cli_main import SMALL

import hmmlm
from hmmlm.baselines.neural import AwdLstmConfig, FeedForwardConfig, LstmConfig, RelaxedHmmConfig
from hmmlm.cli.main import main
from hmmlm.data.modelfolder import CONFIG
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.mixture import MixtureModel, fit_mixture
from hmmlm.lm.predictors import CachePredictor, HmmPredictor, NetworkPredictor, NgramPredictor, Predictor
from hmmlm.lm.recent import AdaptedHmmPredictor, RecentPredictor

WORDS = 6
TOKENIZER = WordTokenizer(["<unk>", "<eos>", "a", "b", "c", "d"])
RESTARTS = {"batches": {"kind": "stream", "eval_reset_at_eos": True}}
CHUNKS = {"batches": {"kind": "chunks", "length": 3}}


def predictors() -> dict[str, Predictor]:
    dense = HMM.from_probs(*random_hmm(3, WORDS, seed=1))
    zeros = HMM.from_probs(*random_hmm(3, WORDS, seed=2, zeros=0.6))
    union = HMM.union([dense, random_blocked_hmm(2, 2, WORDS, seed=3)])
    text = np.random.default_rng(0).integers(WORDS, size=60)
    return {
        "restarts": HmmPredictor(LanguageModel(dense, TOKENIZER, RESTARTS)),
        "carries": HmmPredictor(LanguageModel(dense, TOKENIZER)),
        "chunks": HmmPredictor(LanguageModel(dense, TOKENIZER, CHUNKS)),
        "impossible words": HmmPredictor(LanguageModel(zeros, TOKENIZER, RESTARTS)),
        "impossible words, carried": HmmPredictor(LanguageModel(zeros, TOKENIZER)),
        "union": HmmPredictor(LanguageModel(union, TOKENIZER, RESTARTS)),
        "ngram": NgramPredictor(text, WORDS, 3, None),
        "ngram, restarts": NgramPredictor(text, WORDS, 3, TOKENIZER.eos_id),
        "cache": CachePredictor(4, WORDS),
        "recent": RecentPredictor(2, WORDS),
        "adapted": AdaptedHmmPredictor(LanguageModel(union, TOKENIZER, RESTARTS), 1, torch.arange(1, WORDS + 1)),
        "lstm": NetworkPredictor(LstmConfig(hidden=4).build(TOKENIZER, 0, None)),
        "awd-lstm": NetworkPredictor(AwdLstmConfig(hidden=4, embedding=3).build(TOKENIZER, 0, None)),
        "relaxed-hmm": NetworkPredictor(RelaxedHmmConfig(hidden=4).build(TOKENIZER, 0, None)),
        "feedforward": NetworkPredictor(FeedForwardConfig(hidden=4).build(TOKENIZER, 0, None)),
    }


def mixture() -> MixtureModel:
    """Return a mixture with weights for both classes of contexts of the n-gram."""
    parts = list(predictors().values())
    return MixtureModel(parts, np.random.default_rng(1).dirichlet(np.ones(len(parts)), 2).tolist(), TOKENIZER)


@pytest.mark.parametrize("name", predictors())
def test_texts_without_tokens_have_no_scores(name: str) -> None:
    part = predictors()[name]
    for texts in ([], [[]], [[], [3]]):
        assert [len(log_probs) for log_probs in part.token_log_probs(texts)] == [len(tokens) for tokens in texts]


@pytest.mark.parametrize("name", predictors())
def test_scores_are_those_of_one_token_at_a_time(name: str) -> None:
    part = predictors()[name]
    texts = [[2, 3, 1, 4, 1, 1, 5, 2, 0], [1], [3, 1]]
    for tokens, log_probs in zip(texts, part.token_log_probs(texts), strict=True):
        assert log_probs.dtype == torch.float64 and len(log_probs) == len(tokens)
        context = part.begin()
        for token, log_prob in zip(tokens, log_probs.tolist(), strict=True):
            predicted = part.next_token(context)
            assert float(predicted.exp().sum()) == pytest.approx(1, abs=1e-6)
            assert float(predicted[token]) == pytest.approx(log_prob, abs=1e-5)
            context = part.advance(context, token)
        assert float(part.next_token(context).exp().sum()) == pytest.approx(1, abs=1e-6)


def test_a_mixture_is_a_distribution_over_texts() -> None:
    lm = mixture()
    texts = [list(tokens) for tokens in itertools.product(range(WORDS), repeat=4)]
    total = torch.stack([log_probs.sum() for log_probs in lm.token_log_probs(texts)]).logsumexp(0)
    assert float(total) == pytest.approx(0, abs=1e-6)
    assert sum(p for _, p in lm.next_token("a b", top=100)) == pytest.approx(1)


def test_a_mixture_is_the_weighted_mean() -> None:
    parts = [predictors()[name] for name in ("carries", "cache")]
    lm, tokens = MixtureModel(parts, [0.9, 0.1], TOKENIZER), [2, 2, 3, 1]
    each = [part.token_log_probs([tokens])[0].exp() for part in parts]
    torch.testing.assert_close(lm.token_log_probs([tokens])[0].exp(), 0.9 * each[0] + 0.1 * each[1])
    # The cache has seen 2 once of one word, and neither 3 nor 1.
    assert each[1].tolist() == pytest.approx([1 / WORDS, 1.0, 0.0, 0.0])


def test_weights_depend_on_what_the_ngram_has_seen() -> None:
    ngram, cache = NgramPredictor(np.array([2, 3, 4, 2, 3, 5]), WORDS, 4, None), CachePredictor(4, WORDS)
    tokens = [2, 3, 4, 2, 5, 2]
    classes = [0, 1, 2, 2, 2, 0]  # both texts follow token 0; only 5 after 2 is new
    lm = MixtureModel([ngram, cache], [[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]], TOKENIZER)
    each = [part.token_log_probs([tokens])[0].exp() for part in (ngram, cache)]
    first = torch.tensor([[0.9, 0.5, 0.2][k] for k in classes], dtype=torch.float64)
    torch.testing.assert_close(lm.token_log_probs([tokens])[0].exp(), first * each[0] + (1 - first) * each[1])
    for t, k in enumerate(classes):
        recent = tokens[max(0, t - 4) : t]
        want = [part.next_token(recent).exp() for part in (ngram, cache)]
        got = lm._predict([(recent, recent)])[0].exp()
        torch.testing.assert_close(got, [0.9, 0.5, 0.2][k] * want[0] + [0.1, 0.5, 0.8][k] * want[1])


def test_the_cache_forgets() -> None:
    found = CachePredictor(2, WORDS).token_log_probs([[3, 3, 4, 3, 5, 5, 3]])[0].exp()
    assert found.tolist() == pytest.approx([1 / WORDS, 1, 0, 0.5, 0, 0.5, 0])


def test_scores_of_texts() -> None:
    lm = mixture()
    texts = ["a b", "c\nd a"]
    each = lm.token_scores(texts)
    assert lm.score(texts).tolist() == pytest.approx([sum(p for _, p in tokens) for tokens in each])
    assert lm.perplexity(texts) == pytest.approx(math.exp(-float(lm.score(texts).sum()) / 8))


def test_samples() -> None:
    lm = mixture()
    assert lm.generate(seed=3, num_samples=4, max_new_tokens=9) == lm.generate(seed=3, num_samples=4, max_new_tokens=9)
    assert (
        lm.generate(seed=4, num_samples=1, max_new_tokens=9) == lm.generate(seed=3, num_samples=2, max_new_tokens=9)[1:]
    )
    assert lm.generate(seed=3, max_new_tokens=9) == lm.generate(seed=3, num_samples=1, max_new_tokens=9)[0]
    assert all(text.startswith("a b") for text in lm.generate("a b", seed=0, num_samples=3, max_new_tokens=9))
    assert not any("<unk>" in text for text in lm.generate(seed=0, num_samples=20, max_new_tokens=9, allow_unk=False))
    first = [text.split()[0] if text else "<eos>" for text in lm.generate(seed=0, num_samples=2000, max_new_tokens=1)]
    for word, p in lm.next_token("", top=WORDS):
        assert first.count(word) / 2000 == pytest.approx(p, abs=0.05)


def test_the_weights_are_those_of_the_highest_likelihood() -> None:
    parts = [predictors()[name] for name in ("ngram", "carries", "cache")]
    tokens = np.random.default_rng(5).integers(WORDS, size=200).tolist()
    weights, scores, total = fit_mixture(parts, tokens)
    assert total >= max(scores) and [sum(row) for row in weights] == pytest.approx([1, 1])
    for other in np.random.default_rng(6).dirichlet(np.ones(3), 20):
        assert fit_mixture(parts, tokens, other.tolist())[2] <= total + 1e-4


def test_a_saved_mixture_is_the_same(tmp_path: Path) -> None:
    lm, texts = mixture(), [[2, 3, 1, 4, 1, 1, 5, 2, 0], [3]]
    lm.save(tmp_path / "model")
    again = hmmlm.load(tmp_path / "model", "cpu")
    for got, want in zip(again.token_log_probs(texts), lm.token_log_probs(texts), strict=True):
        torch.testing.assert_close(got, want)
    assert again.generate(seed=1, num_samples=3) == lm.generate(seed=1, num_samples=3)


@pytest.mark.parametrize(
    ("error", "change"),
    [
        ("no list of components", {"components": []}),
        ("no list of weights", {"weights": "a"}),
        ("weights for", {"weights": [1.0]}),
        ("must be probabilities", {"weights": [0.5] * 15}),
        ("must be probabilities", {"weights": [[1.0] + [0.0] * 14, [0.5] * 15]}),
        ("weights for 3 classes of contexts", {"weights": [[1.0] + [0.0] * 14] * 3}),
        ("different numbers of components", {"weights": [[1.0], [0.5, 0.5]]}),
        ("no list of weights", {"weights": [[1.0], "a"]}),
        ("weights must be a list of numbers", {"weights": [10**400, *[0] * 14]}),
        ("training", {"training": {"text": 5}}),
        ("component 0 is damaged", {"components": [{"kind": "odd"}] * 15}),
        ("component 0 is damaged", {"components": [{"kind": "ngram", "order": 3}] * 15}),
        ("component 0 is damaged", {"components": [{"kind": "recent", "half_life": 10**9}] * 15}),
        ("component 0 is damaged", {"components": [{"kind": "adapted hmm", "half_life": 2}] * 15}),
        ("component 0 is damaged", {"components": [{"kind": "cache", "size": -1}] * 15}),
        ("files of two models are mixed", {"components": [{"kind": "network"}] * 15}),
    ],
)
def test_damaged_files_are_refused(error: str, change: dict[str, object], tmp_path: Path) -> None:
    mixture().save(tmp_path)
    header = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**header, **change}))
    with pytest.raises(InputError, match=error):
        hmmlm.load(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("kind", "name"), [("ngram", "order"), ("ngram", "restarts"), ("cache", "size"), ("recent", "half_life")]
)
def test_another_setting_in_the_configuration_is_noticed(kind: str, name: str, tmp_path: Path) -> None:
    mixture().save(tmp_path)
    header = json.loads((tmp_path / CONFIG).read_text())
    part = next(each for each in header["components"] if each["kind"] == kind)
    part[name] = not part[name] if name == "restarts" else part[name] - 1
    header["weights"] = [header["weights"][0]]  # for any number of classes of contexts
    (tmp_path / CONFIG).write_text(json.dumps(header))
    with pytest.raises(InputError, match=r"config.json does not fit model.safetensors"):
        hmmlm.load(tmp_path, "cpu")


def test_another_model_in_the_place_of_a_component_is_noticed(tmp_path: Path) -> None:
    mixture().save(tmp_path)
    number = next(i for i, part in enumerate(mixture().predictors) if part.kind == "hmm")
    header = json.loads((tmp_path / str(number) / CONFIG).read_text())
    header["training"] = {"batches": {"kind": "chunks", "length": 3}}
    (tmp_path / str(number) / CONFIG).write_text(json.dumps(header))
    with pytest.raises(InputError, match="files of two models are mixed"):
        hmmlm.load(tmp_path, "cpu")


def test_a_mixture_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hmmlm.lm.mixture.save_model", fail)
    with pytest.raises(OSError, match="No space"):
        mixture().save(tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


def test_without_unknown_words_nothing_may_be_left() -> None:
    """Both HMMs emit nothing but <unk>."""
    tokenizer = mixture().tokenizer
    emission = torch.zeros(1, tokenizer.vocab_size)
    emission[0, tokenizer.unk_id] = 1.0
    only = LanguageModel(HMM.from_probs([1.0], [[1.0]], emission.tolist()), tokenizer)
    lm = MixtureModel([HmmPredictor(only), HmmPredictor(only)], [0.5, 0.5], tokenizer)
    with pytest.raises(InputError, match="only <unk> can follow"):
        lm.generate(allow_unk=False, seed=1, max_new_tokens=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an HMM, an LSTM, and their mixture with an n-gram and a cache."""
    folder = tmp_path_factory.mktemp("mixture")
    corpus = write_corpus(folder / "animals.txt")
    options = [*SMALL, "--train.epochs", "1", "--quiet"]
    assert main(["train", "--data", str(corpus), *options, "--out", str(folder / "hmm")]) == 0
    network = ["--model.kind", "awd-lstm", "--model.hidden", "8", "--train.epochs", "1", "--quiet"]
    sizes = ["--batches.batch-size", "4", "--batches.length", "8", "--no-train.tensorboard"]
    assert main(["baseline", "--data", str(folder / "hmm"), *network, *sizes, "--out", str(folder / "lstm")]) == 0
    models = [str(folder / "hmm"), str(folder / "lstm"), "--ngram", "5", "--cache", "500", "--recent", "20"]
    assert main(["mix", *models, "--out", str(folder / "mixture")]) == 0
    return folder


def test_commands_work_with_a_mixture(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed, hmm = str(home / "mixture"), str(home / "hmm")
    capsys.readouterr()
    figures = {}
    for model in (mixed, hmm):
        assert main(["eval", model, "--data", hmm, "--json", "--splits", "valid"]) == 0
        figures[model] = json.loads(capsys.readouterr().out)["results"]["valid"]
    assert figures[mixed]["tokens"] == figures[hmm]["tokens"]
    assert figures[mixed]["perplexity"] < figures[hmm]["perplexity"]
    for command in (["score", mixed, str(home / "animals.txt")], ["sample", mixed], ["compare", mixed, hmm]):
        assert main(command) == 0
    assert capsys.readouterr().out
    for command in (["infill", mixed, "the ___"], ["inspect", mixed]):
        assert "is a model of `hmmlm mix`" in failure(capsys, *command)
    assert "not an HMM" in failure(capsys, "sample", mixed, "--must", "dog")
    assert "regex: give a string that is not empty" in failure(capsys, "sample", mixed, "--regex", "")
    assert "--words: give a range of numbers" in failure(capsys, "sample", mixed, "--words", "-")


def test_without_data_a_mixture_is_evaluated_on_the_text_of_its_models(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lstm = str(home / "lstm")
    assert main(["mix", lstm, "--cache", "50", "--out", str(tmp_path / "networks")]) == 0
    second = [*SMALL, "--train.epochs", "1", "--quiet", "--out", str(tmp_path / "second")]
    assert main(["train", "--data", str(home / "hmm"), *second]) == 0  # its data is a folder of token files
    assert main(["mix", str(tmp_path / "second"), lstm, "--out", str(tmp_path / "mixed")]) == 0
    for model in ("networks", "mixed"):
        capsys.readouterr()
        results = []
        for data in ([], ["--data", str(home / "hmm")]):
            assert main(["eval", str(tmp_path / model), "--json", *data]) == 0
            results.append(json.loads(capsys.readouterr().out)["results"])
        assert results[0] == results[1]
        assert main(["compare", str(tmp_path / model), lstm.replace("lstm", "hmm")]) == 0


def test_a_model_without_a_text_is_not_evaluated_on_another(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = hmmlm.load(home / "hmm")
    LanguageModel(lm.hmm, lm.tokenizer).save(tmp_path / "alone")
    for command in (["eval", str(tmp_path / "alone")], ["compare", str(tmp_path / "alone"), str(home / "hmm")]):
        assert "does not name the text that it was trained on: give a text with --data" in failure(capsys, *command)


def test_mistakes(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hmm, lstm, out = str(home / "hmm"), str(home / "lstm"), ["--out", str(tmp_path / "new")]
    hmmlm.load(home / "hmm").save(tmp_path / "alone")
    other = write_corpus(tmp_path / "other.txt", lines=40)
    other.write_text(other.read_text().replace("cat", "unicorn"))
    run = ["--train.epochs", "1", "--quiet", "--out", str(tmp_path / "run")]
    assert main(["train", "--data", str(other), *SMALL, *run]) == 0
    for error, argv in [
        ("at least two models", [hmm, *out]),
        ("2 numbers for 3 components", [hmm, lstm, "--cache", "5", "--weights", ".5,.5", *out]),
        ("sum to 1.1, not to one", [hmm, lstm, "--weights", ".5,.6", *out]),
        ("another vocabulary", [hmm, str(tmp_path / "run"), *out]),
        ("none of the models is the folder of a run", [str(tmp_path / "alone"), "--cache", "5", *out]),
        ("has no token files", [hmm, lstm, "--data", str(tmp_path), *out]),
        ("is not empty", [hmm, lstm, "--out", str(home / "mixture")]),
        ("less than or equal to 10", [hmm, "--ngram", "11", *out]),
    ]:
        assert error in failure(capsys, "mix", *argv)
    assert not (tmp_path / "new").exists()
