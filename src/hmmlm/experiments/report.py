"""One HTML file that shows a run: no script, nothing from outside, readable on a telephone."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hmmlm import __version__
from hmmlm.data.files import write_bytes
from hmmlm.experiments import plots
from hmmlm.experiments.explain import LARGEST, States, explain_states, explain_text, similar_order
from hmmlm.experiments.results import BASELINE_TOKENS, Results, bits, typical_sentence, unknown_share
from hmmlm.experiments.tables import state_followers, state_label, state_words
from hmmlm.learning.config import config_to_dict
from hmmlm.learning.progress import perplexity_text

STATES_SHOWN, HEATMAP_STATES, SAMPLES, SAMPLE_TOKENS = 24, 32, 6, 40
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto;
padding: 1rem; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 46rem; } .quiet { color: #666; font-size: .9rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.tile { flex: 1 1 8rem; border: 1px solid #ddd; border-radius: 6px; padding: .5rem .9rem; }
.tile b { display: block; font-size: 1.6rem; font-weight: 600; } .tile.own { border-color: #d55e00; }
.scroll { overflow-x: auto; } img { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .25rem .8rem .25rem 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #eee; } th { color: #666; font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
blockquote { margin: .5rem 0; padding: .3rem .9rem; border-left: 3px solid #ddd; white-space: pre-wrap;
overflow-wrap: anywhere; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def write_report(results: Results, sentence: str | None = None) -> Path:
    """Write run/report.html and its figures run/plots/*.png; the path of the report."""
    states = explain_states(results.lm) if results.lm.hmm.states <= LARGEST else None
    sentence = sentence or typical_sentence(results.data)
    drawn = _curves(results) | (_state_figures(results, states, sentence) if states is not None else {})
    figures = {name: _png(figure) for name, figure in drawn.items()}
    for name, content in figures.items():
        write_bytes(results.run / "plots" / f"{name}.png", content)
    report = results.run / "report.html"
    write_bytes(report, _page(results, states, sentence, figures).encode())
    return report


def _curves(results: Results) -> dict[str, Figure]:
    curves: dict[str, list[tuple[float, float]]] = {"train": [], "valid": []}
    for record in results.history:
        marginal = record.get("objective") != "joint"  # that of P(O, S) is no perplexity of the text
        if record.get("loss") is not None and record["event"] in curves and marginal:
            curves[record["event"]].append((record["tokens"], math.exp(min(record["loss"], 700))))
    rates = [(r["tokens"], r["rate"]) for r in results.history if r["event"] == "train"]
    baselines = {name: scores["valid"] for name, scores in results.baselines.items()}
    return {
        "learning-curve": plots.learning_curve(curves["train"], curves["valid"], baselines),
        "learning-rate": plots.learning_rate(rates),
    }


def _state_figures(results: Results, states: States, sentence: str) -> dict[str, Figure]:
    tokenizer = results.lm.tokenizer
    shown = similar_order(states, states.order[:HEATMAP_STATES])
    matrix = states.transition[shown][:, shown].numpy()
    path = explain_text(results.lm, sentence)
    # The states that have a say at some word: the Viterbi path's, in the order in which they come, then the others.
    strong = path.posterior.amax(0)
    visited = list(dict.fromkeys(path.states))
    others = [s for s in strong.argsort(descending=True).tolist() if strong[s] > 0.1 and s not in visited]
    rows = visited + others[: max(0, 24 - len(visited))]
    return {
        "transitions": plots.transitions(matrix, [state_label(states, int(s), tokenizer) for s in shown]),
        "posterior": plots.posterior(
            path.posterior[:, rows].double().numpy(), [tokenizer.token(t) for t in path.tokens],
            [state_label(states, s, tokenizer) for s in rows], [rows.index(s) for s in path.states],
        ),
    }  # fmt: skip


def _page(results: Results, states: States | None, sentence: str, figures: Mapping[str, bytes]) -> str:
    lm, data = results.lm, results.data
    title = f"{lm.hmm.states:,} states on {results.config.data}"
    samples = [lm.generate(max_new_tokens=SAMPLE_TOKENS, seed=seed) for seed in range(SAMPLES)]
    seconds = next((r["seconds"] for r in reversed(results.history) if r["event"] == "train"), 0.0)
    trained = sum(r["event"] == "valid" for r in results.history)
    tokens = "the first 20M tokens" if len(data.tokens["train"]) > BASELINE_TOKENS else "the same tokens"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">hmmlm {__version__} · {_text(str(results.run))} · trained {seconds / 60:.1f} minutes, '
        f"{trained} validation checks; figures are of the best of them</p>",
        _tiles(results),
        "<h2>Learning</h2>",
        "<p>Perplexity on the training text as it is read, and on the validation text at every check. Dashed: "
        f"Kneser-Ney n-grams of {tokens}, on the validation text.</p>",
        _image("learning-curve", figures, "learning curve"),
        _image("learning-rate", figures, "learning rate"),
        "<h2>Results</h2>",
        "<p>Perplexity, and bits a token on the test text.</p>",
        _table(("model", "valid", "test", "bits"), _result_rows(results), (1, 2, 3)),
        "<p>The tokens, and the share of words outside the vocabulary.</p>",
        _table(("split", "tokens", "unknown words"), _data_rows(results), (1, 2)),
        *(_state_sections(results, states, sentence, figures) if states is not None else ()),
        "<h2>Samples</h2>",
        *(f"<blockquote>{_text(sample) or '<i>(empty)</i>'}</blockquote>" for sample in samples),
        "<h2>Settings</h2>",
        _table(("setting", "value"), _flat(config_to_dict(results.config))),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _state_sections(results: Results, states: States, sentence: str, figures: Mapping[str, bytes]) -> list[str]:
    return [
        "<h2>What the states stand for</h2>",
        "<p>The states used most, by the share of tokens they emit in the long run, with their most telling words: "
        "those that add most to the information that state and word have of each other, p(w|z) log p(w|z)/p(w).</p>",
        _table(("state", "share", "words", "goes on to"), _state_rows(results, states), (0, 1)),
        "<h2>What follows what</h2>",
        f"<p>Transition probabilities among the {min(HEATMAP_STATES, len(states.mass))} most used states. States "
        "with alike neighbours stand side by side.</p>",
        _image("transitions", figures, "transition probabilities"),
        "<h2>A sentence</h2>",
        f"<p>“{_text(sentence)}”: what the model knows of the state at each word, given the whole sentence, and the "
        "single most likely path.</p>",
        _image("posterior", figures, "posterior over states of a sentence"),
    ]


def _tiles(results: Results) -> str:
    own = f'<div class="tile own">test perplexity<b>{perplexity_text(results.perplexity["test"])}</b></div>'
    others = (
        f'<div class="tile">{_text(name)}<b>{perplexity_text(scores["test"])}</b></div>'
        for name, scores in results.baselines.items()
    )
    return f'<div class="tiles">{own}{"".join(others)}</div>'


def _result_rows(results: Results) -> Iterable[Sequence[str]]:
    own = {f"HMM, {results.lm.hmm.states:,} states": results.perplexity}
    for name, scores in (own | {f"Kneser-Ney {name}": scores for name, scores in results.baselines.items()}).items():
        shown = (perplexity_text(scores[split]) for split in ("valid", "test"))
        yield name, *shown, f"{bits(scores['test']):.2f}"


def _data_rows(results: Results) -> Iterable[Sequence[str]]:
    tokenizer = results.data.tokenizer
    for split, tokens in results.data.tokens.items():
        yield split, f"{len(tokens):,}", f"{unknown_share(tokens, tokenizer.unk_id, tokenizer.eos_id):.1%}"


def _state_rows(results: Results, states: States) -> Iterable[Sequence[str]]:
    tokenizer = results.lm.tokenizer
    for state in states.order[:STATES_SHOWN].tolist():
        followers = state_followers(states, state, tokenizer)
        yield str(state), f"{float(states.mass[state]):.1%}", state_words(states, state, tokenizer), followers


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[Sequence[str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        made = (
            f'<{tag}{" class=n" if i in numbers else ""}>{_text(cell)}</{tag}>' for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table>{row(head, "th")}{body}</table></div>'


def _image(name: str, figures: Mapping[str, bytes], alternative: str) -> str:
    return f'<img alt="{alternative}" src="data:image/png;base64,{base64.b64encode(figures[name]).decode()}">'


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _text(value: str) -> str:
    return html.escape(value)
