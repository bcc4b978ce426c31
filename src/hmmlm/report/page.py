"""Write the report of a run: one self-contained HTML page, and its plots as PNG files."""

from __future__ import annotations

import base64
import io
import math
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from hmmlm import __version__
from hmmlm.data.files import write_bytes
from hmmlm.data.tokenfile import unknown_fraction
from hmmlm.errors import InputError
from hmmlm.lm import embeddings
from hmmlm.report import plots
from hmmlm.report.explain import StateSummary, TextExplanation, explain_states, explain_text, similar_order
from hmmlm.report.facts import split_settings, training_facts
from hmmlm.report.labels import state_followers, state_label, state_words, token_label
from hmmlm.report.results import BASELINE_TOKENS, MIXTURE, MODEL, RunResults, typical_sentence, write_results
from hmmlm.runs.commands import program
from hmmlm.runs.progress import perplexity_text

STATES_SHOWN, HEATMAP_STATES, POSTERIOR_STATES = 24, 32, 24
SAMPLES, SAMPLE_TOKENS = 6, 40
PIXEL_RATIO = 2  # pixels of a plot per CSS pixel: sharp on phones and high-resolution screens
TEMPLATES = Environment(
    loader=PackageLoader("hmmlm.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
Rows = list[tuple[str, ...]]


class Plot(NamedTuple):
    """A plot as the page embeds it."""

    png: bytes
    width: int  # CSS pixels

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode()


def write_report(results: RunResults, sentence: str | None = None) -> Path:
    """Write report.html, results.json and plots/*.png into the folder of a run; return the path of the page.

    Args:
        sentence: the text whose states are shown; by default a line of the test split.
    """
    sentence = sentence or typical_sentence(results.data)
    summary, problem = None, ""
    figures = _training_figures(results)
    if results.lm.hmm.num_states <= embeddings.MAX_STATES:
        summary = explain_states(results.lm)
        figures["transitions"] = _transition_figure(results, summary)
        try:
            figures["posterior"] = _posterior_figure(results, summary, explain_text(results.lm, sentence))
        except InputError as error:  # a sentence of probability zero must not cost the whole report
            problem = str(error)
    drawn = {name: _draw(figure) for name, figure in figures.items()}
    for name, plot in drawn.items():
        write_bytes(results.run / "plots" / f"{name}.png", plot.png)
    write_results(results)
    report = results.run / "report.html"
    write_bytes(report, _render(results, summary, sentence, problem, drawn).encode())
    return report


def next_commands(results: RunResults) -> dict[str, str]:
    """Return commands to try on a run, each with what it does."""
    hmmlm, run = program(), shlex.quote(str(results.run))
    commands = {
        f"{hmmlm} eval {run}": "compute perplexity on the test split, or on another text with --data",
        f"{hmmlm} sample {run}": "generate text; --prompt sets how it starts",
    }
    commands |= {
        f'{hmmlm} infill {run} "the ___ of"': "list the most likely words for a blank",
        f"{hmmlm} score {run} -": "compute the probability of lines that you type, or of a file instead of -",
    }
    if results.config.train.epochs is not None:
        commands[f"{hmmlm} train --resume {run} --train.epochs {2 * results.config.train.epochs}"] = "train longer"
    if results.lm.hmm.num_states <= embeddings.MAX_STATES:
        commands[f"{hmmlm} inspect {run} --contexts"] = "list the states with occurrences in the validation text"
    return commands


def _training_figures(results: RunResults) -> dict[str, Figure]:
    """Plot the learning curve and the learning rate."""
    curves: dict[str, list[tuple[float, float]]] = {"train": [], "valid": []}
    for record in results.history:
        marginal = record.get("objective") != "joint"  # exp of the loss of P(O, S) is not a perplexity of the text
        if record.get("loss") is not None and record["event"] in curves and marginal:
            curves[record["event"]].append((record["tokens"], math.exp(min(record["loss"], 700))))
    rates = [(r["tokens"], r["rate"]) for r in results.history if r["event"] == "train"]
    baselines = {name: scores["valid"].perplexity for name, scores in results.baselines.items()}
    return {
        "learning-curve": plots.learning_curve(curves["train"], curves["valid"], baselines),
        "learning-rate": plots.learning_rate(rates),
    }


def _transition_figure(results: RunResults, summary: StateSummary) -> Figure:
    """Plot the transitions among the HEATMAP_STATES most used states."""
    shown = similar_order(summary, summary.order[:HEATMAP_STATES])
    labels = [state_label(summary, int(state), results.lm.tokenizer) for state in shown]
    return plots.transitions(summary.transition[shown][:, shown].numpy(), labels)


def _posterior_figure(results: RunResults, summary: StateSummary, explanation: TextExplanation) -> Figure:
    """Plot the posterior of the states on the Viterbi path, then of others that are likely somewhere."""
    tokenizer = results.lm.tokenizer
    visited = list(dict.fromkeys(explanation.states))
    peak = explanation.posterior.amax(0)
    likely = [s for s in peak.argsort(descending=True).tolist() if peak[s] > 0.1 and s not in visited]
    shown = visited + likely[: max(0, POSTERIOR_STATES - len(visited))]
    return plots.posterior(
        explanation.posterior[:, shown].double().numpy(),
        [token_label(tokenizer, token) for token in explanation.tokens],
        [state_label(summary, state, tokenizer) for state in shown],
        [shown.index(state) for state in explanation.states],
    )


def _draw(figure: Figure) -> Plot:
    """Render a figure as PNG."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        # Scripts that the font lacks are drawn as boxes; the number of the state still identifies it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(content, format="png", dpi=PIXEL_RATIO * figure.dpi)
    return Plot(content.getvalue(), round(figure.get_figwidth() * figure.dpi))


def _render(
    results: RunResults, summary: StateSummary | None, sentence: str, problem: str, drawn: Mapping[str, Plot]
) -> str:
    """Render the page from its template."""
    train_tokens = len(results.data.tokens["train"])
    changed, defaults = split_settings(results.config)
    return TEMPLATES.get_template("report.html.j2").render(
        title=f"HMM with {results.lm.hmm.num_states:,} states, trained on {results.config.data}",
        version=__version__,
        run=str(results.run),
        tiles=_tiles(results),
        facts=_model_facts(results) | training_facts(results.history),
        baseline_tokens=f"the first {plots.short(BASELINE_TOKENS)}" if train_tokens > BASELINE_TOKENS else "all",
        results=_result_rows(results),
        splits=_split_rows(results),
        states=None if summary is None else _state_rows(results, summary),
        heatmap_states=min(HEATMAP_STATES, results.lm.hmm.num_states),
        sentence=sentence,
        problem=problem,
        samples=[results.lm.generate(max_new_tokens=SAMPLE_TOKENS, seed=seed) for seed in range(SAMPLES)],
        commands=next_commands(results),
        changed=changed,
        defaults=defaults,
        plots=drawn,
    )


def _model_facts(results: RunResults) -> dict[str, str]:
    """Return the size of the vocabulary and the share of unknown words by label."""
    unknown = results.scores["test"].unknown_share
    return {"vocabulary": f"{results.lm.hmm.vocab_size:,}", "unknown words in test": f"{unknown:.1%}"}


def _tiles(results: RunResults) -> dict[str, str]:
    """Return test perplexity by label, the model's own first, or the mixture's (see `RunResults.best_first`)."""
    scores = {name: perplexity_text(score.perplexity) for name, score in results.best_first().items()}
    (first, best), *others = scores.items()
    return {f"test perplexity{'' if first == MODEL else f' of {first}'}": best, **dict(others)}


def _result_rows(results: RunResults) -> Rows:
    scores = {f"HMM, {results.lm.hmm.num_states:,} states": results.scores}
    scores |= {f"Kneser-Ney {name}": by_split for name, by_split in results.baselines.items()}
    weight = results.mixture_weight
    scores[f"{MIXTURE} (weights {weight:.2f} and {1 - weight:.2f}, chosen on valid)"] = results.mixture
    return [
        (
            name,
            perplexity_text(by_split["valid"].perplexity),
            perplexity_text(by_split["test"].perplexity),
            perplexity_text(by_split["test"].known_perplexity),
            f"{by_split['test'].bits_per_token:.2f}",
            "–" if by_split["test"].bits_per_byte is None else f"{by_split['test'].bits_per_byte:.3f}",
        )
        for name, by_split in scores.items()
    ]


def _split_rows(results: RunResults) -> Rows:
    tokenizer = results.data.tokenizer
    return [
        (split, f"{len(tokens):,}", f"{unknown_fraction(tokens, tokenizer.unk_id, tokenizer.eos_id):.1%}")
        for split, tokens in results.data.tokens.items()
    ]


def _state_rows(results: RunResults, summary: StateSummary) -> Rows:
    tokenizer = results.lm.tokenizer
    return [
        (
            str(state),
            f"{float(summary.mass[state]):.1%}",
            state_words(summary, state, tokenizer),
            state_followers(summary, state, tokenizer),
        )
        for state in summary.order[:STATES_SHOWN].tolist()
    ]
