"""The adapter to lm-evaluation-harness, against enumeration by single scores and against the harness itself."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hmmlm.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from hmmlm.data.words import WordTokenizer
from hmmlm.errors import InputError, InputWarning
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.models.neural import Neural
from hmmlm.ops import pieces
from hmmlm.structure.blocks import Blocks

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm-eval")
from hmmlm.lm.harness import HarnessModel, main  # noqa: E402

WORDS = ["<unk>", "<eos>", "the", "cat", "dog", "sat", "ran", "."]
LINES = ["the cat sat .", "the dog ran .", "a cat and a dog", "yes and no"] * 5
CONFIGS: dict[str, dict[str, Any]] = {
    "stream": {},
    "restarts": {"batches": {"kind": "stream", "eval_reset_at_eos": True}},
    "chunks": {"batches": {"kind": "chunks", "length": 3}},
}
pytestmark = pytest.mark.filterwarnings("ignore::hmmlm.errors.InputWarning")


def request(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def random_lm(tokenizer: Tokenizer, config: dict[str, Any] | None = None, states: int = 5) -> LanguageModel:
    generator = torch.Generator().manual_seed(3)
    shapes = ((states,), (states, states), (states, tokenizer.vocab_size))
    logs = [(2 * torch.randn(s, generator=generator, dtype=torch.float64)).log_softmax(-1) for s in shapes]
    return LanguageModel(HMM(*logs), tokenizer, config)


@pytest.fixture(params=CONFIGS)
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return random_lm(WordTokenizer(WORDS), CONFIGS[request.param])


def next_token(lm: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """Return p(next token | tokens) [V], one score at a time."""
    scores = [lm.token_log_probs([[*tokens, v]])[0][-1] for v in range(lm.tokenizer.vocab_size)]
    return torch.stack(scores).exp()


def test_loglikelihood_is_that_of_the_tokens_after_the_context(lm: LanguageModel) -> None:
    pairs = [
        ("the cat", " sat ."),
        ("the cat", " sat .\n"),
        ("the cat ", "sat"),
        ("the cat sat .\n", "the dog"),
        ("the cat sat .\n\nthe", " dog ran"),
        ("", "the dog"),
        ("the cat", ""),
    ]
    tokens = [([2, 3], [5, 7]), ([2, 3], [5, 7, 1]), ([2, 3], [5]), ([2, 3, 5, 7, 1], [2, 4])]
    tokens += [([2, 3, 5, 7, 1, 2], [4, 6]), ([], [2, 4]), ([2, 3], [])]
    results = HarnessModel(lm).loglikelihood([request(*pair) for pair in pairs])
    for (context, continuation), (score, greedy) in zip(tokens, results, strict=True):
        expected, best = 0.0, True
        for i, token in enumerate(continuation):
            probs = next_token(lm, context + continuation[:i])
            assert float(probs.sum()) == pytest.approx(1)
            expected, best = expected + math.log(probs[token]), best and int(probs.argmax()) == token
        assert score == pytest.approx(expected, abs=1e-9)
        assert greedy == best


def test_the_greedy_continuation_is_greedy_and_any_other_is_not(lm: LanguageModel) -> None:
    model = HarnessModel(lm)
    for context in ("the cat", "the", "", "the dog ran .\n"):
        (text,) = model.generate_until([request(context, {"max_gen_toks": 4})])
        other = ("the" if text.split()[-1] != "the" else "dog") if text else "the"
        changed = " ".join([*text.split()[:-1], other])
        results = model.loglikelihood([request(context, " " + words) for words in (text, changed)])
        assert [greedy for _, greedy in results] == [True, False]


def test_rolling_loglikelihood_is_that_of_the_whole_text(lm: LanguageModel) -> None:
    texts = ["the cat sat .\nthe dog ran .\n", "the cat " * 50, "the"]
    rolling = HarnessModel(lm).loglikelihood_rolling([request(text) for text in texts])
    assert rolling[0] == pytest.approx(float(lm.score(texts[:1])), abs=1e-9)
    for text, score in zip(texts[1:], rolling[1:], strict=True):
        assert score == pytest.approx(float(lm.token_log_probs([lm.encode(text)[:-1]])[0].sum()), abs=1e-9)


def test_texts_are_generated_alike_alone_and_in_a_batch(lm: LanguageModel) -> None:
    options = [{"max_gen_toks": 6}, {"max_gen_toks": 6, "do_sample": True}, {"temperature": 0.7, "top_k": 3}]
    contexts = ["the cat", "", "the dog ran .\n", "the", "the cat sat . the dog"]
    requests = [request(context, each) for each in options for context in contexts]
    together = HarnessModel(lm).generate_until(requests)
    with pieces.limit(1):
        assert HarnessModel(lm).generate_until(requests) == together
    for i, each in enumerate(requests):
        assert HarnessModel(lm, seed=i).generate_until([each]) == [together[i]]


def test_greedy_texts_are_those_of_generate(lm: LanguageModel) -> None:
    for context in ("the cat", "", "the dog ran .\n"):
        (text,) = HarnessModel(lm).generate_until([request(context, {"until": ["\n"], "max_gen_toks": 8})])
        assert context + text == lm.generate(context, max_new_tokens=8, temperature=0)


def test_sampled_tokens_have_their_probabilities() -> None:
    lm = random_lm(WordTokenizer(WORDS))
    requests = [request("the cat", {"do_sample": True, "max_gen_toks": 1})] * 4000
    texts = HarnessModel(lm).generate_until(requests)
    probs = next_token(lm, [2, 3])
    for token, word in enumerate(WORDS):
        share = texts.count("" if word == "<eos>" else f" {word}") / len(texts)
        assert share == pytest.approx(float(probs[token]), abs=4 * math.sqrt(0.25 / len(texts)))


def test_a_text_ends_before_the_first_stop_string() -> None:
    lm = random_lm(WordTokenizer(WORDS))
    model = HarnessModel(lm)
    (whole,) = model.generate_until([request("the", {"do_sample": True, "max_gen_toks": 30})])
    words = whole.split()
    assert len(words) > 2
    (text,) = model.generate_until([request("the", {"do_sample": True, "until": [words[2], "never"]})])
    assert text == whole[: whole.index(words[2])]
    assert model.generate_until([request("the", {"do_sample": True, "until": words[2]})]) == [text]


def test_subwords() -> None:
    tokenizer = HuggingFaceTokenizer.train(LINES, 300)
    lm = random_lm(tokenizer)
    assert not tokenizer.unk_id
    results = HarnessModel(lm).loglikelihood([request("the cat", " sat ."), request("the ca", "t sat .")])
    given = lm.encode("the cat")[:-1]
    whole = lm.encode("the cat sat .")[:-1]
    assert whole[: len(given)] == given
    assert results[0][0] == pytest.approx(float(lm.token_log_probs([whole])[0][len(given) :].sum()), abs=1e-9)
    assert math.isfinite(results[1][0])


def test_a_blocked_model_answers_as_its_dense_form() -> None:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), 4)
    hmm = Neural(blocks, hidden=4, generator=torch.Generator().manual_seed(0))().detach().to(torch.float64)
    requests = [request("the cat", " sat ."), request("", "the"), request("the dog ran .\n", "the")]
    texts = [request(context, {"max_gen_toks": 5, "do_sample": True}) for context in ("the cat", "", "the dog ran")]
    blocked, dense = (HarnessModel(LanguageModel(each, WordTokenizer(WORDS))) for each in (hmm, hmm.dense()))
    pairs = zip(blocked.loglikelihood(requests), dense.loglikelihood(requests), strict=True)
    assert all(ours[0] == pytest.approx(theirs[0], abs=1e-6) and ours[1] == theirs[1] for ours, theirs in pairs)
    assert blocked.generate_until(texts) == dense.generate_until(texts)


def test_a_closed_vocabulary_gives_a_warning() -> None:
    with pytest.warns(InputWarning, match="closed vocabulary of 8 words"):
        model = HarnessModel(random_lm(WordTokenizer(WORDS)))
    with pytest.warns(InputWarning, match="1 of 2 tokens of the requests are outside the vocabulary"):
        model.loglikelihood([request("the", " cat flew")])


def test_wrong_options_and_impossible_contexts_are_named() -> None:
    model = HarnessModel(random_lm(WordTokenizer(WORDS)))
    with pytest.raises(InputError, match="num_beams=4 is not supported"):
        model.generate_until([request("the", {"num_beams": 4})])
    with pytest.raises(InputError, match="temperature"):
        model.generate_until([request("the", {"temperature": -1, "do_sample": True})])
    emission = torch.eye(8, dtype=torch.float64)[[1, 2]]  # "the", then <eos>
    hmm = HMM.from_probs([0.0, 1.0], [[0.5, 0.5], [0.5, 0.5]], emission)
    impossible = HarnessModel(LanguageModel(hmm, WordTokenizer(WORDS)))
    with pytest.raises(InputError, match="probability zero"):
        impossible.generate_until([request("cat", {})])
    assert impossible.loglikelihood([request("cat", " the"), request("the", " cat")]) == [(-math.inf, False)] * 2


# --- the harness itself ---------------------------------------------------------------------------------------------

MULTIPLE_CHOICE = """
task: hmmlm_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
PERPLEXITY = """
task: hmmlm_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: word_perplexity}]
"""


def test_the_harness_runs_local_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lm = random_lm(WordTokenizer(WORDS))
    lm.save(tmp_path / "model")
    choices = ["cat", "dog", "ran"]
    contexts = ["the", "the cat sat .", "the dog ran"]
    best = [int(torch.tensor([float(next_token(lm, lm.encode(c)[:-1])[WORDS.index(w)]) for w in choices]).argmax())
            for c in contexts]  # fmt: skip
    rows = [{"context": c, "choices": choices, "label": label} for c, label in zip(contexts, best, strict=True)]
    rows[-1]["label"] = (best[-1] + 1) % 3
    (tmp_path / "choice.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "the cat sat . the dog ran ."
    (tmp_path / "text.json").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choice.yaml").write_text(MULTIPLE_CHOICE % (tmp_path / "choice.json"))
    (tmp_path / "tasks" / "perplexity.yaml").write_text(PERPLEXITY % (tmp_path / "text.json"))
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hmmlm",
        model_args=f"pretrained={tmp_path / 'model'},device=cpu",
        tasks=["hmmlm_choice", "hmmlm_perplexity"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )["results"]
    assert found["hmmlm_choice"]["acc,none"] == pytest.approx(2 / 3)
    log_prob = float(lm.token_log_probs([lm.encode(text)[:-1]])[0].sum())
    assert found["hmmlm_perplexity"]["byte_perplexity,none"] == pytest.approx(math.exp(-log_prob / len(text)))


def test_the_default_device_of_the_harness_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_lm(WordTokenizer(WORDS)).save(tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert HarnessModel(str(tmp_path / "model"), device="cuda:0").lm.device == torch.device("cpu")


def test_the_module_is_the_command_of_the_harness() -> None:
    command = [sys.executable, "-m", "hmmlm.lm.harness", "--help"]
    assert "--model" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_folder_without_a_model_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "local.yaml").write_text(
        "task: local\ndataset_path: json\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: x\n"
    )
    options = ["--model_args", f"pretrained={tmp_path / 'none'}", "--include_path", str(tmp_path), "--tasks", "local"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "hmmlm", *options])
    assert main() == 2
    assert re.search(r"^hmmlm: error: no model .*none", capsys.readouterr().err, re.MULTILINE)
