"""Questions about text: scores of tokens and of continuations, next tokens, states, embeddings, training."""

import inspect
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm
from helpers.runs import write_text

import hmmlm
from hmmlm.cli.main import main
from hmmlm.data.tokenfile import write_tokens
from hmmlm.data.tokenizers import HuggingFaceTokenizer
from hmmlm.data.words import WordTokenizer
from hmmlm.errors import InputError, InputWarning
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.ops import pieces
from hmmlm.report.results import score_tokens
from papers.runner import evaluate_tokens

WORDS = ["<unk>", "<eos>", "the", "cat", "dog", "sat"]
READINGS: dict[str, dict[str, Any]] = {
    "lines": {"kind": "stream", "eval_reset_at_eos": True},
    "one stream": {"kind": "stream", "eval_reset_at_eos": False},
    "chunks": {"kind": "chunks", "length": 5, "batch_size": 2},
}


def make_lm(kind: str = "dense", reading: str = "one stream", seed: int = 0) -> LanguageModel:
    hmm = HMM(*(p.log() for p in random_hmm(4, len(WORDS), seed)))
    if kind == "blocked":
        hmm = random_blocked_hmm(2, 2, len(WORDS), seed)
    return LanguageModel(hmm, WordTokenizer(WORDS), {"batches": READINGS[reading]})


both_kinds = pytest.mark.parametrize("kind", ["dense", "blocked"])
all_readings = pytest.mark.parametrize("reading", list(READINGS))
TEXT = "the cat sat\ndog\n\nthe dog sat the cat\ncat"


# --- one way to read a text -----------------------------------------------------------------------------------------


@pytest.mark.slow
@both_kinds
@all_readings
def test_perplexity_is_that_of_evaluation(kind: str, reading: str, tmp_path: Path) -> None:
    lm = make_lm(kind, reading)
    text = "\n".join([TEXT] * 300)  # long enough for several streams in validation
    documents = [lm.encode(line) for line in text.split("\n") if line]
    tokens = write_tokens(tmp_path / "text", documents, len(WORDS), lm.tokenizer.fingerprint())
    result = evaluate_tokens(lm, tokens)
    assert result.tokens == len(lm.encode(text))
    assert lm.perplexity([text]) == pytest.approx(result.perplexity, rel=1e-9)
    for part in (1 << 20, 7, 1):
        score = score_tokens(lm, tokens, part)
        assert score.tokens == result.tokens
        assert score.perplexity == pytest.approx(result.perplexity, rel=1e-9)


def test_chunks_start_from_the_start_distribution() -> None:
    lm, tokens = make_lm(reading="chunks"), make_lm().encode(TEXT)
    parts = [tokens[i : i + 5] for i in range(0, len(tokens), 5)]
    assert lm.sequences(tokens) == parts
    assert lm.score([TEXT]).item() == pytest.approx(sum(float(lm.hmm.log_likelihood([part])) for part in parts))


# --- scores ---------------------------------------------------------------------------------------------------------


@both_kinds
@all_readings
def test_token_scores_are_conditional_probabilities(kind: str, reading: str) -> None:
    lm = make_lm(kind, reading)
    texts = [TEXT, "dog", "", "the unicorn"]
    scores = lm.token_scores(texts)
    torch.testing.assert_close(torch.tensor([sum(p for _, p in text) for text in scores]).double(), lm.score(texts))
    assert [token for token, _ in scores[3]] == ["the", "<unk>", "<eos>"]
    tokens = lm.encode(TEXT)
    sequences = lm.sequences(tokens)
    want = [
        float(lm.hmm.next_token([sequence[:t]])[0, sequence[t]]) if t else float(lm.hmm.log_likelihood([sequence[:1]]))
        for sequence in sequences
        for t in range(len(sequence))
    ]
    assert [p for _, p in scores[0]] == pytest.approx(want)


@both_kinds
def test_conditional_scores_of_all_continuations_sum_to_one(kind: str) -> None:
    lm = make_lm(kind)
    words = [word for word in WORDS if word != "<eos>"]
    short = [" ".join(text) for length in (0, 1, 2) for text in itertools.product(words, repeat=length)]
    ended = lm.score(short, given="the cat\ndog").exp().sum()
    longer = [" ".join(text) for text in itertools.product(words, repeat=3)]
    # Texts of at least three words: their first three tokens, without what follows.
    going = sum(
        math.exp(sum(p for _, p in t[4:7])) for t in lm.token_scores([f"the cat\ndog {text}" for text in longer])
    )
    assert float(ended) + going == pytest.approx(1)


@both_kinds
@all_readings
def test_conditional_scores_are_differences_of_scores(kind: str, reading: str) -> None:
    lm = make_lm(kind, reading)
    texts, given = ["sat the", "cat\ndog sat", ""], ["the", "dog\nthe cat", "the\n"]
    whole = [
        lm.encode("the sat the"),
        lm.encode("dog\nthe cat cat\ndog sat"),
        [*lm.encode("the"), WORDS.index("<eos>")],
    ]
    prefixes = [lm.encode(a)[: None if a.endswith("\n") else -1] for a in given]

    def log_prob(tokens: list[int]) -> float:
        return sum(float(lm.hmm.log_likelihood([part])) for part in lm.sequences(tokens))

    want = [log_prob(tokens) - log_prob(prefix) for tokens, prefix in zip(whole, prefixes, strict=True)]
    assert lm.score(texts, given=given).tolist() == pytest.approx(want)
    assert lm.score(["cat"], given="").tolist() == pytest.approx(lm.score(["cat"]).tolist())
    assert lm.score([], given="the").shape == (0,)


def test_conditional_scores_of_subwords_and_their_errors() -> None:
    tokenizer = HuggingFaceTokenizer.train(["the function returns a list"] * 5, 300)
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, tokenizer.vocab_size, 0))), tokenizer)
    prefix, whole = tokenizer.encode("the function"), lm.encode("the function returns a list")
    want = float(lm.hmm.log_likelihood([whole]) - lm.hmm.log_likelihood([prefix]))
    assert lm.score(["returns a list"], given="the function").item() == pytest.approx(want)
    with pytest.raises(InputError, match="given has 2 texts for 1: give one for each, or one for all"):
        lm.score(["a"], given=["b", "c"])
    one = torch.ones(1)
    only_the = LanguageModel(HMM.from_probs(one, one[None], torch.eye(len(WORDS))[2:3]), WordTokenizer(WORDS))
    with pytest.raises(InputError, match="given, of text 0, has probability zero"):
        only_the.score(["the"], given="cat")
    assert only_the.token_scores(["the cat the"])[0] == [("the", 0.0), ("cat", -math.inf)] + [
        (word, -math.inf) for word in ("the", "<eos>")
    ]


# --- next tokens, states, embeddings --------------------------------------------------------------------------------


@both_kinds
def test_next_token(kind: str) -> None:
    lm = make_lm(kind)
    for text, tokens in (("the cat", [2, 3]), ("the\ncat ", [2, 1, 3]), ("the\n", [2, 1])):
        want = lm.hmm.next_token([tokens])[0].exp()
        found = lm.next_token(text, top=100)
        assert dict(found) == pytest.approx({word: float(want[i]) for i, word in enumerate(WORDS) if want[i] > 0})
        assert found[:2] == lm.next_token(text, top=2)
        assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
    first = (lm.hmm.dense().log_start.exp() @ lm.hmm.dense().emission.log_probs.exp()).tolist()
    assert dict(lm.next_token(top=6)) == pytest.approx(dict(zip(WORDS, first, strict=True)))


@both_kinds
@all_readings
def test_states_are_viterbi_states_with_their_posteriors(kind: str, reading: str) -> None:
    lm = make_lm(kind, reading)
    texts = [TEXT, "dog sat", "", "the cat the dog sat"]
    with pieces.limit(8 * lm.hmm.num_states):
        states = lm.states(texts)
    for text, found in zip(texts, states, strict=True):
        assert [word for word, _, _ in found] == [lm.tokenizer.token(i) for i in lm.encode(text)]
        want: list[tuple[int, float]] = []
        for sequence in lm.sequences(lm.encode(text)):
            path, posterior = lm.hmm.viterbi([sequence])[0][0], lm.hmm.posterior([sequence])[0]
            want += [(int(z), float(posterior[t, z])) for t, z in enumerate(path)]
        assert [state for _, state, _ in found] == [state for state, _ in want]
        assert [p for _, _, p in found] == pytest.approx([p for _, p in want])


@both_kinds
@pytest.mark.parametrize("reading", ["lines", "one stream"])
def test_embeddings_are_long_run_frequencies(kind: str, reading: str) -> None:
    lm = make_lm(kind, reading)
    start, transition, emission = (p.exp() for p in lm.hmm.dense().tensors().values())
    state, joint = start, torch.zeros(len(WORDS), 4, dtype=torch.float64)
    for _ in range(20_000):  # the distribution of (word, state), step by step
        here = state[:, None] * emission
        joint += here.t()
        ends = here[:, 1].sum() if reading == "lines" else 0.0
        staying = state * (1 - emission[:, 1]) if reading == "lines" else state
        state = ends * start + staying @ transition
    vectors = lm.embeddings()
    torch.testing.assert_close(vectors, joint / joint.sum(1, keepdim=True), atol=1e-3, rtol=0)
    similarity = torch.nn.functional.cosine_similarity(vectors[3:4], vectors, dim=1)
    want = sorted(((WORDS[i], float(s)) for i, s in enumerate(similarity) if i != 3), key=lambda pair: -pair[1])
    found = lm.nearest("cat", top=3)
    assert [word for word, _ in found] == [word for word, _ in want[:3]]
    assert [s for _, s in found] == pytest.approx([s for _, s in want[:3]])
    vectors.zero_()  # a copy
    assert lm.nearest("cat", top=3) == found


def test_nearest_words_need_a_word_of_the_vocabulary() -> None:
    lm = make_lm()
    for word in ("unicorn", "the cat", ""):
        with pytest.raises(InputError, match="is not a word of the vocabulary"):
            lm.nearest(word)
    assert len(lm.nearest("<unk>", top=100)) == len(WORDS) - 1


# --- devices, warnings, representations -----------------------------------------------------------------------------


def test_the_device_is_chosen_on_loading(tmp_path: Path) -> None:
    make_lm().save(tmp_path)
    assert load(tmp_path, device="cpu").hmm.device == torch.device("cpu")
    assert load(tmp_path, torch.device("cpu")).to("auto").hmm.device.type in ("cpu", "cuda")
    with pytest.raises(InputError, match="unknown device 'gpu': use 'auto', 'cpu' or 'cuda'"):
        load(tmp_path, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="'cuda' is not available"):
            make_lm().to("cuda")


ASK = [
    lambda lm: lm.generate("the unicorn", max_new_tokens=2),
    lambda lm: lm.next_token("the unicorn"),
    lambda lm: lm.score(["cat"], given="the unicorn"),
    lambda lm: lm.guide(must=["cat"], prompt="the unicorn"),
]


@pytest.mark.parametrize("ask", ASK)
def test_unknown_words_of_a_prompt_give_a_warning(
    ask: Callable[[LanguageModel], object], recwarn: pytest.WarningsRecorder
) -> None:
    lm = make_lm()
    lm.generate("the <unk> cat", max_new_tokens=2)
    assert not [w for w in recwarn if issubclass(w.category, InputWarning)]
    with pytest.warns(InputWarning, match="outside the vocabulary, read as <unk>: 'unicorn'") as caught:
        ask(lm)
    assert caught[0].filename == __file__


def test_what_is_not_a_text_before_the_texts_is_refused() -> None:
    for given in (5, {"the": 1}, b"the"):
        with pytest.raises(InputError, match=r"given is a .*, not a string or a list of strings"):
            make_lm().score(["cat"], given=given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the prompt is a int, not a string"):
        make_lm().score(["cat"], given=[5])  # type: ignore[list-item]


def test_a_blank_that_is_almost_surely_unknown() -> None:
    """p(the) is e^−115 beside <unk>, below the range of float32; given that it is not <unk>, it is certain."""
    never = -math.inf
    for log_prob, expected in ((-115.0, [[("the", pytest.approx(1.0))]]), (never, [[]])):
        log_emission = torch.tensor([[0.0, never, log_prob], [never, 0.0, never]])
        hmm = HMM(torch.tensor([0.0, never]), torch.tensor([[never, 0.0], [never, 0.0]]), log_emission)
        lm = LanguageModel(hmm, WordTokenizer(["<unk>", "<eos>", "the"]))
        assert lm.infill("___", allow_unk=False) == expected


def test_representations_are_short() -> None:
    lm = make_lm()
    guide, position = lm.guide(must=["cat"])
    assert repr(lm.tokenizer) == "WordTokenizer(words=6, split='whitespace', lowercase=False)"
    for value in (guide, position, guide.automaton, hmmlm.Steering(guide, position), lm.tokenizer):
        assert len(repr(value)) < 160 and " at 0x" not in repr(value) and "tensor(" not in repr(value)
    for shown in (lm._repr_html_(), make_lm("blocked")._repr_html_()):
        assert "<table>" in shown and "WordTokenizer(words=6" in shown
        assert "<th>states</th><td>4</td>" in shown and "<th>words</th><td>6</td>" in shown
    assert "<th>parameters</th><td>44</td>" in lm.hmm._repr_html_()


def test_every_public_name_is_listed_and_found() -> None:
    assert {"train", "padded", "set_threads", "load", "HMM"} <= set(dir(hmmlm))
    assert set(dir(hmmlm)) == set(hmmlm.__all__) == set(hmmlm._MODULE_OF) | {"__version__", "emissions", "transitions"}
    for name in dir(hmmlm):
        assert getattr(hmmlm, name) is not None


def test_the_help_of_generate_has_every_constraint() -> None:
    text = inspect.getdoc(LanguageModel.generate) or ""
    names = [field.name for field in fields(hmmlm.Constraint)]
    assert "hmmlm.Constraint" in text and all(re.search(rf"`{name}`|{name}=", text) for name in names)


# --- training -------------------------------------------------------------------------------------------------------


def test_training_from_python(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "text")
    settings = {"tokenizer": {"kind": "word"}, "batches": {"batch_size": 2, "length": 8}, "train": {"epochs": 1}}
    lm = hmmlm.train(folder, tmp_path / "run", model={"num_states": 4}, **settings)
    assert lm.hmm.num_states == 4
    assert lm.config["train"]["epochs"] == 1 and lm.config["data"] == str(folder)
    assert load(tmp_path / "run").score(["a"]).tolist() == pytest.approx(lm.score(["a"]).tolist())
    with pytest.raises(InputError, match=r"hmmlm\.train: .*model\.color"):
        hmmlm.train(folder, tmp_path / "other", model={"color": 4})
    with pytest.raises(InputError, match=r"hmmlm\.train: unknown setting \w+; did you mean model\.num_states\?"):
        hmmlm.train(folder, tmp_path / "other", states=64)
    with pytest.raises(InputError, match="dry_run is an option of the command alone"):
        hmmlm.train(folder, tmp_path / "other", dry_run=True)
    assert not (tmp_path / "other").exists()


def test_training_from_python_is_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its report and figures; a column of texts, which is no list, gives the same run as their file."""
    monkeypatch.setenv("HMMLM_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    texts = [f"the {word} sat on the {other}" for word in ["cat", "dog", "man"] for other in ["mat", "hat", "bed"]] * 4
    Path("my.txt").write_text("\n".join(texts))
    options = ["--model.num-states", "4", "--train.epochs", "2", "--batches.batch-size", "2", "--batches.length", "8"]
    assert main(["train", "--data", "my.txt", "--out", "command", *options]) == 0
    printed = [capsys.readouterr().out]
    settings = {"model": {"num_states": 4}, "train": {"epochs": 2}, "batches": {"batch_size": 2, "length": 8}}
    hmmlm.train("my.txt", "python", **settings)
    printed.append(capsys.readouterr().out)
    figures = [re.findall("^test perplexity .*", text, re.M) for text in printed]
    assert figures[0] and figures[0] == figures[1]
    lm = hmmlm.train(Column(texts), "column", quiet=True, **settings)
    assert torch.equal(lm.score(["the cat"]), hmmlm.load("python").score(["the cat"]))
    assert torch.equal(lm.score(["the cat"]), hmmlm.load("command").score(["the cat"]))
    for run in ("command", "python", "column"):
        assert (Path(run) / "results.json").read_text() == Path("command/results.json").read_text()
        assert (Path(run) / "report.html").exists()
    assert Path(lm.config["data"]).read_text() == Path("my.txt").read_text()
    assert hmmlm.train(out=None, resume="column", quiet=True).config["data"] == lm.config["data"]
    with pytest.raises(InputError, match=r"data\[1\] must be a string, not 5"):
        hmmlm.train(["a", 5])


class Column:
    """A column of texts with its own index, as pandas has it: no list, but a sequence."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> str:
        return self.texts[i]
