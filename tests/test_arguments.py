"""Every public function refuses wrong arguments with an InputError of one line, or takes them as documented."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from helpers.causal import tiny_llama
from helpers.oracle import random_blocked_hmm, random_hmm
from torch import Tensor

import hmmlm
from hmmlm import HMM, Guide, InputError, LanguageModel, Steering, emissions, transitions
from hmmlm.arguments import check_arguments, describe
from hmmlm.baselines.ngram import NgramModel
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.lm.mixture import MixtureModel
from hmmlm.lm.predictors import CachePredictor, HmmPredictor, NgramPredictor
from hmmlm.lm.union import join_models

WORDS = ["<unk>", "<eos>", *"abcd"]
WRONG: dict[str, Any] = {
    "None": None,
    "a word": "x",
    "an empty string": "",
    "NUL": "a\0b",
    "a lone surrogate": "\udcff",
    "bytes": b"x",
    "a number": 1.5,
    "NaN": math.nan,
    "negative": -3,
    "beyond 64 bits": 2**70,
    "thousands of digits": 10**5000,
    "True": True,
    "an empty list": [],
    "None in a list": [None],
    "words": ["a"],
    "a list of lists": [[1, 2]],
    "a dictionary": {"a": 1},
    "a generator": (i for i in [1]),
    "an object": object(),
    "a class": dict,
    "a number as a tensor": torch.tensor(1),
    "floats": torch.ones(2, 3),
    "no values": torch.ones(2, 4, dtype=torch.long, device="meta"),
    "sparse": torch.eye(4).to_sparse(),
    "an array of objects": np.array([None]),
}
"""What is the wrong argument nearly everywhere; where it is not, the function returns."""
CONSTRAINT: dict[str, Any] = {
    **dict.fromkeys(("regex", "json", "suffix", "automaton")),
    "match": "word",
    "choice": (),
    "words": (None, None),
    "tokens": (None, None),
}


def calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return public functions by name, each with arguments that are right."""
    start, transition, emission = random_hmm(3, len(WORDS), seed=1)
    dense, blocked = HMM.from_probs(start, transition, emission), random_blocked_hmm(2, 2, len(WORDS), seed=3)
    union, tokenizer = HMM.union([dense, blocked]), WordTokenizer(WORDS)
    lm, text = LanguageModel(dense, tokenizer), np.arange(40) % len(WORDS)
    mixture = MixtureModel(
        [HmmPredictor(lm), CachePredictor(4, 6), NgramPredictor(text, 6, 3, None)], [0.5, 0.3, 0.2], tokenizer
    )
    mixture.save(folder / "mixture")
    guide, position = lm.guide(must=["a"], max_new_tokens=3)
    automaton, ngram, llama = lm.automaton(must=["a b"]), NgramModel(text, 6, 3), tiny_llama(6, eos=1, pad=5)
    prompt = torch.tensor([[2]])
    particles = hmmlm.sample_particles(llama, prompt, guide, position, 2, 1)
    tokens, lengths = torch.tensor([[2, 3, 4, -1], [1, 2, 3, 4]]), torch.tensor([4, 2])
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "HMM": (
            HMM,
            {"log_start": dense.log_start, "transition": dense.transition, "emission": dense.emission, "impl": "auto"},
        ),
        "HMM of matrices": (
            HMM,
            {"log_start": start.log(), "transition": transition.log(), "emission": emission.log(), "impl": "auto"},
        ),
        "HMM.from_probs": (HMM.from_probs, {"start": start, "transition": transition, "emission": emission}),
        "HMM.random": (HMM.random, {"num_states": 3, "vocab_size": 4, "seed": 0}),
        "HMM.from_hmmlearn": (HMM.from_hmmlearn, {"model": None}),
        "HMM.from_dynamax": (HMM.from_dynamax, {"params": None}),
        "HMM.fit": (dense.fit, {"tokens": tokens, "iterations": 2, "tolerance": 1e-4, "pseudocount": 0.1}),
        "HMM.learn": (
            HMM.learn,
            {"sequences": tokens, "num_states": 2, "lengths": lengths, "restarts": 1, "seed": 0, "vocab_size": 6}
            | {"iterations": 2, "tolerance": 1e-4, "pseudocount": 0.1},
        ),
        "HMM.choose": (
            HMM.choose,
            {"sequences": tokens, "num_states": [1, 2], "lengths": lengths, "restarts": 1, "seed": 0}
            | {"pseudocount": 0.1},
        ),
        "HMM.save": (dense.save, {"path": folder / "hmm.safetensors"}),
        "HMM.load": (HMM.load, {"path": folder / "hmm.safetensors"}),
        "HMM.union": (HMM.union, {"models": [dense, blocked], "weights": [0.5, 0.5]}),
        "transitions.Dense": (transitions.Dense, dense.transition.tensors()),
        "transitions.Factored": (transitions.Factored, blocked.transition.tensors()),
        "emissions.Categorical": (emissions.Categorical, dense.emission.tensors()),
        "emissions.Blocked": (emissions.Blocked, {**blocked.emission.tensors(), "num_blocks": 2}),
        "padded": (hmmlm.padded, {"sequences": [[1, 2], [3]]}),
        "set_threads": (hmmlm.set_threads, {"num": 1}),
        "Automaton": (
            hmmlm.Automaton,
            {"next": torch.zeros(1, 2, dtype=torch.long), "accepting": torch.tensor([True])},
        ),
        "automaton.read": (automaton.read, {"tokens": [2, 3], "state": 0}),
        "automaton.accepts": (automaton.accepts, {"tokens": [2, 3]}),
        "automaton &": (automaton.__and__, {"other": automaton}),
        "automaton |": (automaton.__or__, {"other": automaton}),
        "automaton.until": (automaton.until, {"end": 1, "require_eos": True}),
        "automaton.without": (automaton.without, {"token": 1}),
        "automaton.starting_at": (automaton.starting_at, {"state": 1}),
        "Guide": (Guide, {"hmm": dense, "automaton": automaton, "length": 4}),
        "guide.begin": (guide.begin, {"tokens": [2]}),
        "guide.advance": (guide.advance, {"position": position, "token": 2}),
        "guide.advance_all": (guide.advance_all, {"positions": [position], "tokens": [2]}),
        "Steering": (Steering, {"guide": guide, "position": position, "weight": 1.0}),
        "Steering.batch": (Steering.batch, {"guided": [(guide, position)], "weight": 1.0}),
        "steering": (Steering(guide, position), {"input_ids": prompt, "scores": torch.zeros(1, 6)}),
        "sample_particles": (
            hmmlm.sample_particles,
            {"model": llama, "input_ids": prompt, "guide": guide, "position": position, "num_particles": 2, "seed": 1}
            | {"resample_below": 0.5},
        ),
        "particles.draw": (particles.draw, {"seed": 1}),
        "save_ctrlg": (
            hmmlm.save_ctrlg,
            {"hmm": dense, "path": folder / "control", "eos_token_id": 1, "tokenizer": tokenizer},
        ),
        "LanguageModel": (LanguageModel, {"hmm": dense, "tokenizer": tokenizer, "config": {}}),
        "lm.score": (lm.score, {"texts": ["a b"], "given": "a"}),
        "lm.sequences": (lm.sequences, {"tokens": [2, 3]}),
        "lm.score_sequences": (lm.score_sequences, {"sequences": [[2, 3], [1]]}),
        "lm.context": (lm.context, {"given": [2]}),
        "lm.states": (lm.states, {"texts": ["a b"]}),
        "lm.nearest": (lm.nearest, {"word": "a", "top": 2}),
        "lm.infill": (lm.infill, {"text": "a ___", "top": 2, "allow_unk": True}),
        "lm.guide": (
            lm.guide,
            {
                "must": ["a"],
                "never": (),
                "max_new_tokens": 4,
                "prompt": "c",
                "allow_unk": True,
                "require_eos": True,
                **CONSTRAINT,
            },
        ),
        "lm.automaton": (lm.automaton, {"must": ["a"], "never": (), **CONSTRAINT}),
        "Constraint": (hmmlm.Constraint, {"must": ["a"], "never": (), **CONSTRAINT}),
        "lm.to": (lm.to, {"device": "cpu"}),
        "lm.explore": (lambda **given: lm.explore(**given).close(), {"other": None, "height": 100}),
        "lm.save_pretrained": (lm.save_pretrained, {"path": folder / "card", "results": None}),
        "load": (hmmlm.load, {"path": folder / "mixture", "device": "cpu", "revision": None}),
        "MixtureModel": (
            MixtureModel,
            {"predictors": [HmmPredictor(lm)], "weights": [1.0], "tokenizer": tokenizer, "config": {}, "device": None},
        ),
        "HmmPredictor": (HmmPredictor, {"lm": lm}),
        "CachePredictor": (CachePredictor, {"size": 4, "vocab_size": 6}),
        "NgramPredictor": (NgramPredictor, {"text": text, "vocab_size": 6, "order": 3, "restart": None}),
        "join_models": (join_models, {"models": [lm, lm], "weights": [0.5, 0.5]}),
        "NgramModel": (NgramModel, {"tokens": text, "vocab_size": 6, "order": 3, "eos": 1}),
        "ngram.perplexity": (ngram.perplexity, {"tokens": [1, 2]}),
        "ngram.next_token": (ngram.next_token, {"context": [1, 2]}),
        "train": (
            hmmlm.train,
            {"data": folder / "none.txt", "out": folder / "run", "recipe": None, "model": {"num_states": 4}},
        ),
        "distill": (hmmlm.distill, {"model": str(folder / "none"), "out": folder / "run", "tokens": 10}),
    }
    for query in ("joint", "next_token", "log_prob_accept", "log_probs_accept"):
        found[f"guide.{query}"] = getattr(guide, query), {"position": position}
    for query in ("next_tokens", "log_probs_accept_of"):
        found[f"guide.{query}"] = getattr(guide, query), {"positions": [position]}
    for name, hmm in (("dense", dense), ("blocked", blocked), ("union", union)):
        batch = {"tokens": tokens, "lengths": lengths}
        names = "log_likelihood posterior viterbi next_token entropy infill expected_counts score predict aic bic"
        for query in (*names.split(), "predict_proba"):
            found[f"{name}.{query}"] = getattr(hmm, query), batch
        carry = hmmlm.Carry(torch.full((2, hmm.num_states), 1 / hmm.num_states).log())
        found |= {
            f"{name}.filter": (hmm.filter, {**batch, "carry": carry}),
            f"{name}.token_log_probs": (hmm.token_log_probs, {**batch, "carry": carry}),
            f"{name}.sample": (hmm.sample, {"num_samples": 2, "length": 3, "generator": None, "seed": 1}),
            f"{name}.posterior_sample": (
                hmm.posterior_sample,
                {**batch, "num_samples": 2, "generator": None, "seed": 1},
            ),
            f"{name}.infill_at": (hmm.infill_at, {"tokens": tokens[:1], "position": 1}),
            f"{name}.infill_blanks": (hmm.infill_blanks, {"tokens": tokens[:1], "excluded": 1}),
            f"{name}.advance": (hmm.advance, {"log_state": hmm.begin(), "token": 2}),
            f"{name}.emit": (hmm.emit, {"log_states": hmm.begin(), "tokens": torch.tensor([1, 2])}),
            f"{name}.to": (lambda device, hmm=hmm: hmm.to(device), {"device": "cpu"}),
        }
    for name, model in (("lm", lm), ("mixture", mixture)):
        for query in ("score", "perplexity", "token_scores"):
            found[f"{name}.{query} of texts"] = getattr(model, query), {"texts": ["a b", "c"]}
        found |= {
            f"{name}.encode": (model.encode, {"text": "a"}),
            f"{name}.token_log_probs": (model.token_log_probs, {"encoded": [[2, 3], [1]]}),
            f"{name}.next_token": (model.next_token, {"text": "a", "top": 2}),
            f"{name}.generate": (
                model.generate,
                {"prompt": "a", "max_new_tokens": 3, "temperature": 1.0, "top_k": 2, "seed": 1, "allow_unk": True}
                | {"must": (), "never": (), "num_samples": 1, "top_p": 0.9, "stream": False, **CONSTRAINT},
            ),
            f"{name}.save": (model.save, {"path": folder / "model"}),
        }
    return found


def test_wrong_arguments_of_every_public_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is the name of a folder to save to
    threads, faults, refused = torch.get_num_threads(), list[str](), 0
    for name, (function, right) in calls(tmp_path).items():
        for argument in right:
            for what, wrong in WRONG.items():
                try:
                    function(**{**right, argument: wrong})
                except InputError as error:
                    refused += 1
                    if "\n" in str(error) or len(str(error)) > 400:
                        faults.append(f"{name}({argument}={what}): a message of {len(str(error))} characters")
                except Exception as error:
                    faults.append(f"{name}({argument}={what}): {type(error).__name__}: {error}")
    torch.set_num_threads(threads)
    assert not faults, "\n".join(faults)
    assert refused > 4_000
    public = {name.split(".")[0] for name in calls(tmp_path)}
    types = {"Carry", "Counts", "Display", "Filtered", "InputError", "InputWarning", "Particles", "__version__"}
    assert set(hmmlm.__all__) <= public | types


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Guide("model", "automaton", 3), "hmm must be an HMM, not 'model'"),
        (lambda: LanguageModel(None, WordTokenizer(WORDS)), "hmm must be an HMM, not None"),
        (lambda: hmmlm.sample_particles(None, [[2]], None, None), r"input_ids must be a tensor, not \[\[2\]\]"),
        (lambda: HMM.random(2, 3).to("gpu"), "cannot move a model to 'gpu': give a device or a dtype"),
        (lambda: HMM.union("ab"), "models must be a list, each item an HMM, not 'ab'"),
        (lambda: HMM.union([HMM.random(2, 3), 5]), r"models\[1\] must be an HMM, not 5"),
        (lambda: HMM.random(2, 3).fit([[0]], pseudocount=True), "pseudocount must be a number of at least 0, not True"),
        (lambda: HMM(*HMM.random(2, 3).tensors().values(), impl="fast"), "impl must be one of 'auto', 'naive', "),
        (lambda: hmmlm.load(""), "'' is no path: give that of the model's folder"),
        (lambda: hmmlm.train(out=["a"]), r"out must be a string, a path or None, not \['a'\]"),
    ],
)
def test_messages(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_what_only_an_hmm_answers() -> None:
    lm = LanguageModel(HMM.from_probs(*random_hmm(3, len(WORDS), seed=1)), WordTokenizer(WORDS))
    mixture = MixtureModel([HmmPredictor(lm)], [1.0], lm.tokenizer)
    for query in ("guide", "infill", "states", "nearest", "embeddings", "automaton", "explore"):
        assert hasattr(lm, query) and not hasattr(mixture, query)
    with pytest.raises(InputError, match="a mixture is not an HMM, so it has no guide: use an HMM"):
        mixture.guide(must=["a"])
    with pytest.raises(AttributeError, match="'MixtureModel' object has no attribute 'nothing'"):
        _ = mixture.nothing


def test_a_mixture_is_loaded_as_any_model(tmp_path: Path) -> None:
    lm = LanguageModel(HMM.from_probs(*random_hmm(3, len(WORDS), seed=1)), WordTokenizer(WORDS))
    mixture = MixtureModel([HmmPredictor(lm), CachePredictor(4, 6)], [0.7, 0.3], lm.tokenizer)
    mixture.save(tmp_path / "mixture")
    lm.save(tmp_path / "model")
    loaded = hmmlm.load(tmp_path / "mixture", device="cpu")
    assert isinstance(loaded, hmmlm.MixtureModel)
    assert torch.equal(loaded.score(["a b", "c"]), mixture.score(["a b", "c"]))
    assert isinstance(hmmlm.load(os.fspath(tmp_path / "model")), LanguageModel)


@check_arguments
def annotated(
    count: int,
    path: str | Path = "",
    names: Sequence[str] = (),
    rows: Sequence[Sequence[int]] = (),
    mode: Literal["a", "b"] = "a",
    values: Tensor | None = None,
    flag: bool = True,
    **others: int,
) -> int:
    return count


def test_arguments_are_checked_by_their_annotations() -> None:
    assert annotated(np.int64(3), Path("x"), ["a"], [[1], (2,), np.array([3])], values=torch.ones(1), more="x") == 3
    for given, message in [
        ({"count": 1.0}, "count must be an integer, not 1.0"),
        ({"count": True}, "count must be an integer, not True"),
        ({"path": 1}, "path must be a string or a path, not 1"),
        ({"names": "ab"}, "names must be a list, each item a string, not 'ab'"),
        ({"names": {"a": 1}}, "names must be a list, each item a string, not a dict"),
        ({"rows": [[1], [2, "x"]]}, r"rows\[1\]\[1\] must be an integer, not 'x'"),
        ({"mode": "c"}, "mode must be one of 'a', 'b', not 'c'"),
        ({"values": torch.eye(2).to_sparse()}, r"values must be a dense tensor with values, not a sparse tensor of"),
        ({"flag": 1}, "flag must be True or False, not 1"),
    ]:
        with pytest.raises(InputError, match=message):
            annotated(**{"count": 1, **given})
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        annotated()


def test_values_in_messages_are_short() -> None:
    assert describe(10**5000) == "an integer of 16,610 bits"
    assert describe(torch.ones(2, 3)) == "a tensor of shape [2, 3]"
    assert describe([1, "a"]) == "[1, 'a']" and describe([0] * 9) == "a list" and describe((None,)) == "(None,)"
    assert describe("x" * 999) == f"'{'x' * 59}…" and describe(object()) == "an object"
