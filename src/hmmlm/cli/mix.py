"""`hmmlm mix`: the interpolation of several models as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from hmmlm.cli.combine import CombineArguments, Weight, print_weights
from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.section import MAX_TOKENS
from hmmlm.terminal import counted

if TYPE_CHECKING:
    from hmmlm.lm.mixture import MixtureModel

DESCRIPTION = """Write the linear interpolation of models with one vocabulary as one model: the probability of every
word is the weighted mean of theirs. Models are HMMs, unions (`hmmlm join`), LSTMs and feed-forward
networks (`hmmlm baseline`), and with options a Kneser-Ney n-gram of the training text and a cache.
With --recent, HMMs adapt to the words of the text so far, which helps most on long texts.
`hmmlm eval`, `score`, `sample` and `compare` work with the result, which is not an HMM.

The weights maximize the likelihood of the validation text (EM). With an n-gram they depend on how
many of the words before, from two to all of its context, it has seen together: the more, the better
it predicts.

examples:
  hmmlm mix runs/mine --ngram 5 --cache 500 --out models/mixture
  hmmlm mix runs/mine --ngram 5 --recent 150 --out models/mixture
  hmmlm mix runs/mine baselines/lstm --out models/mixture
  hmmlm mix models/both --data runs/mine --ngram 5 --out models/mixture"""


class MixArguments(CombineArguments):
    weights: tuple[Weight, ...] = ()
    """Weights of the models in this order, then of the n-gram, the cache and the recent words if there are, separated
    by commas, that sum to one; none: by EM."""
    ngram: Annotated[int, Field(ge=0, le=10)] = 0
    """Order of a Kneser-Ney n-gram of the training text; 0: none."""
    cache: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Number of the last words whose frequencies are a component; 0: none."""
    recent: Annotated[int, Field(ge=0, le=50_000)] = 0
    """Half-life, in words, of the frequencies of recent words that HMMs adapt to; words that have followed the last two
    before are a component, with twice the half-life. 0: none."""


def run(argv: list[str]) -> int:
    arguments = parse(MixArguments, argv, "mix", DESCRIPTION)

    from hmmlm.lm.scoring import perplexity

    count = len(arguments.models) + sum(map(bool, (arguments.ngram, arguments.cache, arguments.recent)))
    if count < 2:
        raise InputError("a mixture needs at least two models: give more folders, --ngram N, --cache N or --recent N")
    arguments.check(count, "components")
    mixture, scores, tokens = build(arguments)
    mixture.save(arguments.out)
    _print(arguments, mixture, [perplexity(score, tokens) for score in scores])
    return 0


def build(arguments: MixArguments) -> tuple[MixtureModel, list[float], int]:
    """Return the mixture, the log-likelihoods of valid under its components and itself, and the tokens of valid."""
    import numpy as np
    import torch

    from hmmlm.cli.models import tokens_of_models
    from hmmlm.device import pick_device
    from hmmlm.lm.mixture import MixtureModel, fit_mixture
    from hmmlm.lm.predictors import (
        CachePredictor,
        HmmPredictor,
        NgramPredictor,
        Predictor,
        open_predictor,
        predictor_tokenizer,
    )
    from hmmlm.lm.recent import AdaptedHmmPredictor, RecentPredictor
    from hmmlm.training.prepare import reopen

    folder = tokens_of_models(arguments.data, arguments.models)
    if folder is None:
        raise InputError("none of the models is the folder of a run: give one with --data, for its text")
    prepared = reopen(folder)
    device = pick_device(arguments.device)
    for path in arguments.models:
        if predictor_tokenizer(path).fingerprint() != prepared.tokenizer.fingerprint():
            raise InputError(f"{path} has another vocabulary than the text: train it on the same token files")
    parts: list[Predictor] = [open_predictor(path, device) for path in arguments.models]
    lms = [part.lm for part in parts if isinstance(part, HmmPredictor)]
    words, restarts = prepared.tokenizer.vocab_size, bool(lms) and lms[0].restarts
    text = np.asarray(prepared.tokens["train"].tokens)
    if arguments.recent:
        counts = torch.from_numpy(np.bincount(text, minlength=words) + 0.5)  # a word may be missing
        parts = [
            AdaptedHmmPredictor(part.lm, arguments.recent, counts) if isinstance(part, HmmPredictor) else part
            for part in parts
        ]
    if arguments.ngram:
        parts.append(NgramPredictor(text, words, arguments.ngram, prepared.tokenizer.eos_id if restarts else None))
    if arguments.cache:
        parts.append(CachePredictor(arguments.cache, words))
    if arguments.recent:
        parts.append(RecentPredictor(2 * arguments.recent, words))
    valid = prepared.tokens["valid"].tokens.tolist()
    weights, scores, total = fit_mixture(parts, valid, arguments.weights or None)
    own_text = {"data": str(folder), "text": {"unit": prepared.tokens["train"].unit}}
    mixture = MixtureModel(parts, weights, prepared.tokenizer, lms[0].config if lms else own_text, device)
    return mixture, [*scores, total], len(valid)


def _print(arguments: MixArguments, mixture: MixtureModel, perplexities: list[float]) -> None:
    names = list(map(str, arguments.models))
    names += [f"Kneser-Ney {arguments.ngram}-gram"] if arguments.ngram else []
    names += [f"cache of {counted(arguments.cache, 'word')}"] if arguments.cache else []
    names += ["recent words"] if arguments.recent else []
    digits = 4 if len(mixture.weights) == 1 else 2
    weights = [" ".join(f"{weight:.{digits}f}" for weight in of_part) for of_part in mixture.weights.T]
    several = len(mixture.weights) > 1
    caption = f"weights: the n-gram knows 1 … {len(mixture.weights)} words before" if several else ""
    print_weights([*names, str(arguments.out)], weights, perplexities, caption)
