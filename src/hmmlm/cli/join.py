"""`hmmlm join`: several models as one HMM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hmmlm.cli.combine import CombineArguments, print_weights
from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.terminal import counted

if TYPE_CHECKING:
    from hmmlm.lm.lm import LanguageModel
    from hmmlm.training.prepare import Prepared

DESCRIPTION = """Write the union of several HMMs with one vocabulary as one model: exactly an HMM, whose transition
matrix is block-diagonal and whose start distribution is the weights times those of the models. So
every sequence (a line, if the models restart after <eos>) is drawn from one of them. All commands
that use a model work with it.

The weights maximize the likelihood of the validation text (EM), that of the first model that is the
folder of a run. They are equal if none is, or if the models read a text as one sequence.

examples:
  hmmlm join runs/first runs/second --out models/both
  hmmlm join runs/first runs/second --weights .3,.7 --out models/both"""


def run(argv: list[str]) -> int:
    arguments = parse(CombineArguments, argv, "join", DESCRIPTION)

    if len(arguments.models) < 2:
        raise InputError("a union needs at least two models: give their folders")
    arguments.check(len(arguments.models), "models")
    joined, weights, perplexities = build(arguments)
    joined.save(arguments.out)
    names = [*map(str, arguments.models), f"{arguments.out} ({counted(joined.hmm.num_states, 'state')})"]
    print_weights(names, [f"{weight:.4f}" for weight in weights], perplexities)
    return 0


def build(arguments: CombineArguments) -> tuple[LanguageModel, list[float], list[float] | None]:
    """Return the union, its weights, and the validation perplexities of the models and itself, if there is a text."""
    from hmmlm.cli.models import tokens_of_models
    from hmmlm.lm.lm import load
    from hmmlm.lm.union import check_alike, join_models
    from hmmlm.training.prepare import reopen

    models = [load(path, arguments.device) for path in arguments.models]
    check_alike(models)
    folder = tokens_of_models(arguments.data, arguments.models)
    weights, perplexities = _fit(None if folder is None else reopen(folder), models, arguments.weights)
    return join_models(models, weights), weights, perplexities


def _fit(
    prepared: Prepared | None, models: list[LanguageModel], given: tuple[float, ...]
) -> tuple[list[float], list[float] | None]:
    """Return the weights, and the validation perplexities of the models and their union, if there is a text."""
    from hmmlm.lm.scoring import perplexity
    from hmmlm.lm.union import fit_sequence_weights, sequence_scores

    equal = [1 / len(models)] * len(models)
    if prepared is None:
        return list(given or equal), None
    if prepared.tokenizer.fingerprint() != models[0].tokenizer.fingerprint():
        raise InputError("the token files have another vocabulary than the models: give those of their text")
    tokens = prepared.tokens["valid"].tokens.tolist()
    scores = sequence_scores(models, tokens)
    weights = list(given or (fit_sequence_weights(scores) if scores.shape[1] > 1 else equal))
    both = (scores + scores.new_tensor(weights).log()[:, None]).logsumexp(0)
    totals = [*scores.sum(1).tolist(), float(both.sum())]
    return weights, [perplexity(total, len(tokens)) for total in totals]
