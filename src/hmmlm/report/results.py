"""Evaluate a finished run: perplexities of its best model and of n-gram baselines on the same tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.baselines.mixture import fit_weights_by_class, mix
from hmmlm.baselines.ngram import FloatArray, NgramModel
from hmmlm.config.run import RunConfig
from hmmlm.data.files import RESULTS, write_bytes
from hmmlm.data.tokenfile import TokenFile
from hmmlm.distributed.ranks import world
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.lm.scoring import TextScore, score_of
from hmmlm.lm.textmodel import TextModel
from hmmlm.runs.folders import saved_config
from hmmlm.runs.history import read_history
from hmmlm.training.prepare import Prepared, reopen

BASELINES = {"unigram": 1, "bigram": 2, "5-gram": 5}
MODEL = "model"
MIXTURE = "HMM + 5-gram"
"""The linear interpolation of the model with the last baseline."""
BASELINE_TOKENS = 8_000_000  # training tokens of the n-grams at most: their counts take almost a gigabyte
PART_TOKENS = 1 << 20
SENTENCE_TOKENS = range(9, 16)  # tokens of a sentence to explain, <eos> included


@dataclass(frozen=True)
class RunResults:
    """A finished run: its best model, data, history, and scores."""

    run: Path
    lm: LanguageModel
    config: RunConfig
    data: Prepared
    history: list[dict[str, Any]]
    scores: dict[str, TextScore]  # of the model, by split: valid and test
    baselines: dict[str, dict[str, TextScore]]  # by name, then by split
    mixture: dict[str, TextScore]  # of the model and the last baseline, by split
    mixture_weight: float  # of the model in it, the mean over the tokens of valid, where the weights were chosen
    test_log_probs: dict[str, FloatArray]  # of the test tokens [N], by the model and by the last baseline

    def best_first(self) -> dict[str, TextScore]:
        """Return test scores by name: the model first, or the mixture where the 5-gram alone beats the model."""
        both = {MODEL: self.scores["test"], MIXTURE: self.mixture["test"]}
        others = {name: scores["test"] for name, scores in self.baselines.items()}
        if others["5-gram"].perplexity < both[MODEL].perplexity:
            return {MIXTURE: both[MIXTURE], "HMM": both[MODEL], **others}
        return {MODEL: both[MODEL], **others, MIXTURE: both[MIXTURE]}


def evaluate_run(run: Path) -> RunResults:
    """Load the best model of the run in the folder `run`, and evaluate it and its baselines.

    The model is evaluated on the device that the run is configured for.
    """
    config, data = saved_config(RunConfig, run), reopen(run)
    lm = load(run, config.train.device)
    splits = ("valid", "test")
    texts = {split: np.asarray(data.tokens[split].tokens) for split in splits}
    baselines = {}
    for name, order in BASELINES.items():
        ngram = count_ngram(data, order, lm.restarts)
        last = {split: ngram.log_probs(texts[split]) for split in splits}
        baselines[name] = {split: score_split(data, split, last[split]) for split in splits}
    own = {split: _log_probs(lm, data.tokens[split]).numpy() for split in splits}
    both = {split: np.stack([own[split], last[split]]) for split in splits}
    classes = {split: ngram.known_contexts(texts[split])[:-1] for split in splits}
    weights = fit_weights_by_class(both["valid"], classes["valid"], ngram.context_classes)
    return RunResults(
        run=run,
        lm=lm,
        config=config,
        data=data,
        history=read_history(run / "history.jsonl"),
        scores={split: score_split(data, split, own[split]) for split in splits},
        baselines=baselines,
        mixture={split: score_split(data, split, mix(both[split], weights[classes[split]].T)) for split in splits},
        mixture_weight=float(weights[classes["valid"], 0].mean()),
        test_log_probs={MODEL: own["test"], name: last["test"]},
    )


def write_results(results: RunResults) -> Path:
    """Write results.json into the folder of a run: the figures of the model and its baselines, by split."""
    models = {MODEL: results.scores, **results.baselines, MIXTURE: results.mixture}
    figures = {name: {split: score.figures() for split, score in scores.items()} for name, scores in models.items()}
    figures[MIXTURE]["hmm_weight"] = results.mixture_weight  # type: ignore[assignment]
    path = results.run / RESULTS
    write_bytes(path, (json.dumps(figures, indent=1) + "\n").encode())
    return path


def run_folder(path: Path) -> Path | None:
    """Return the training run that `path` is, or is in (run/best, run/checkpoints/…), if its token files exist."""
    candidates = (path, *path.absolute().parents[:2], *path.resolve().parents[:2])
    return next((folder for folder in candidates if (folder / "data" / "test.json").exists()), None)


def score_tokens(lm: TextModel, tokens: TokenFile, part_tokens: int = PART_TOKENS) -> TextScore:
    """Score a text, each token given those before it, with the share and the log-likelihood of its unknown words."""
    log_probs = _log_probs(lm, tokens, part_tokens)
    return score_of(lm.tokenizer, np.asarray(tokens.tokens, np.int64), log_probs, tokens.text_bytes)


def _log_probs(lm: TextModel, tokens: TokenFile, part_tokens: int = PART_TOKENS) -> Tensor:
    """Return log p [N] of every token of a text given those before it.

    The text is read in parts of about `part_tokens` tokens that end where the chain restarts, since lists of tokens are
    large. Of several processes, each reads every n-th piece between two restarts.
    """
    ids, batches = np.asarray(tokens.tokens), lm.config.get("batches", {})
    if not isinstance(lm, LanguageModel):  # a cache does not restart
        begins = np.zeros(1, dtype=np.int64)
    elif batches.get("kind") == "chunks":
        begins = np.arange(0, len(ids), batches.get("length", len(ids)))
    elif lm.restarts:  # a document may end without `<eos>`
        begins = np.union1d(tokens.documents[:-1], np.flatnonzero(ids[:-1] == lm.tokenizer.eos_id) + 1)
    else:
        begins = np.zeros(1, dtype=np.int64)
    texts = np.split(ids, begins[1:])
    part = np.searchsorted(np.arange(part_tokens, len(ids), part_tokens), begins, side="right")
    groups = np.split(np.arange(len(texts)), np.flatnonzero(np.diff(part)) + 1)
    ranks, own = world(), [torch.zeros(0, dtype=torch.float64)]
    for group in groups:
        own += lm.token_log_probs([texts[i].tolist() for i in group if i % ranks.count == ranks.rank])
    owner = torch.from_numpy(np.repeat(np.arange(len(texts)) % ranks.count, [len(text) for text in texts]))
    log_probs = torch.empty(len(ids), dtype=torch.float64)
    for rank, found in enumerate(ranks.gather(torch.cat(own))):
        log_probs[owner == rank] = found
    return log_probs


def count_ngram(data: Prepared, order: int, restarts: bool, most: int = BASELINE_TOKENS) -> NgramModel:
    """Return the Kneser-Ney n-gram of the first training tokens, `most` of them; it restarts where the HMM does."""
    eos = data.tokenizer.eos_id if restarts else None
    train = np.asarray(data.tokens["train"].tokens[:most])
    return NgramModel(train, data.tokenizer.vocab_size, order, eos)


def score_split(data: Prepared, split: str, log_probs: FloatArray) -> TextScore:
    """Return the score of a split from log-probabilities of its tokens [N]."""
    tokens = data.tokens[split]
    ids = np.asarray(tokens.tokens).astype(np.int64)
    return score_of(data.tokenizer, ids, torch.from_numpy(log_probs), tokens.text_bytes)


def typical_sentence(data: Prepared) -> str:
    """Return a line of the test split to explain: the first of 8 to 14 known words, else the start of the first."""
    tokenizer = data.tokenizer
    ids = np.asarray(data.tokens["test"].tokens[:50_000])
    lines = [line for line in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1) if len(line) > 1]
    suitable = (line for line in lines if len(line) in SENTENCE_TOKENS and tokenizer.unk_id not in line)
    line = next(suitable, lines[0] if lines else ids)[: SENTENCE_TOKENS.stop - 1]
    return tokenizer.decode([int(i) for i in line if i != tokenizer.eos_id])
