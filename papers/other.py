"""Measurements of the library that are not about a table or figure of a paper."""

from __future__ import annotations

from typing import Literal

from papers import study as topics
from papers.rows import Results
from papers.study import Lines, Study, StudyRow, Summary

BLOCKED_CPU = Study(
    name="blocked-cpu",
    title="The blocked scan on the CPU: tiles shared by steps, beside one tile per step",
    topic=topics.SPEED,
    device="CPU",
    made_by="python -m benchmarks.blocked_cpu",
    headers={"as_it_comes_ms": "shared tiles, ms", "a_tile_a_step_ms": "one tile per step, ms"},
)
FAST_PATHS = Study(
    name="fast-paths",
    title="What fast paths on the CPU buy: the same call with and without each",
    topic=topics.SPEED,
    device="CPU",
    made_by="python -m benchmarks.fast_paths",
    headers={"with_ms": "with it, ms", "without_ms": "without it, ms", "times_as_fast": "times as fast"},
)
PARALLEL_SCAN = Study(
    name="parallel-scan",
    title="Long sequences in parallel chunks, beside one step after another",
    topic=topics.SPEED,
    made_by="python -m benchmarks.parallel_scan",
    headers={
        f"{name}_{what}_ms": f"{name}, {what}, ms"
        for what in ("likelihood", "gradient")
        for name in ("loops", "steps", "chunks")
    },
)
GPU_FUZZ = Study(
    name="gpu-fuzz",
    title="Answers of random models on a GPU beside enumeration",
    topic=topics.SPEED,
    made_by="PYTHONPATH=src:tests python -m helpers.fuzz",
    headers={"models": "models", "right": "right answers", "wrong": "wrong answers"},
)
COMMANDS_CPU = Study(
    name="commands-cpu",
    title="Commands on the CPU, start and loading included",
    topic=topics.SPEED,
    device="CPU",
    made_by="python -m benchmarks.commands",
    headers={"command_seconds": "s"},
)
STEERING = Study(
    name="steering",
    title="A language model steered to a word, beside the exact answer",
    topic=topics.CONTROL,
    device="CPU",
    made_by="python -m benchmarks.steering",
    headers={"log_probability_a_token": "log probability per token"},
)
CPU_DEFAULT = Study(
    name="cpu-default",
    title="Settings for two CPU cores: 1 MB of English and Penn Treebank",
    device="CPU",
    trials=True,
    as_recorded=True,
    headers={
        "ngram_test_perplexity": "5-gram, test",
        "mixture_valid_perplexity": "HMM + 5-gram, valid",
        "mixture_test_perplexity": "HMM + 5-gram, test",
    },
)
DEFAULTS = Study(
    name="defaults",
    title="The settings that `hmmlm train` chooses, on texts of many kinds",
    device="CPU",
    made_by="python -m papers.defaults",
    headers={
        "unigram_test_perplexity": "unigram, test",
        "bigram_test_perplexity": "bigram, test",
        "ngram_test_perplexity": "5-gram, test",
        "mixture_test_perplexity": "HMM + 5-gram, test",
        "words": "vocabulary",
        "tokens": "training tokens",
        "states": "states",
        "seconds": "s",
    },
)
DEMO = Study(
    name="demo",
    title="The demo",
    device="CPU",
    rows=(StudyRow(name="hmmlm demo", recipe="demo", seeds=(0,)),),
    made_by="python docs/record_demo.py",
    headers={
        "ngram_valid_perplexity": "5-gram, valid",
        "ngram_test_perplexity": "5-gram, test",
        "mixture_valid_perplexity": "HMM + 5-gram, valid",
        "mixture_test_perplexity": "HMM + 5-gram, test",
    },
)
SPEED = Study(
    name="speed",
    title="Headline steps beside their peers",
    topic=topics.SPEED,
    made_by="python -m benchmarks.speed",
    columns=("tokens per second", "ms per step", "peak GB"),
    headers={
        "bare_products_ms": "bare products, ms",
        "times_bare_products": "× bare products",
        "drawn_products_ms": "products of random values, ms",
        "autograd_ms": "autograd, ms",
        "pyjuice_ms": "PyJuice, ms",
        "paper_ms": "paper, ms",
        "log_likelihood_error": "error of the likelihood",
        "gradient_error": "error of the gradient",
        "log_likelihood_error_peaked": "error of the likelihood, peaked",
        "gradient_error_peaked": "error of the gradient, peaked",
    },
)


def _part_of_control(row: str) -> str:
    """Return the heading of the table of `CONTROL` that a row stands in."""
    headings = {
        "one call": "Time of a call for one token, with random HMMs",
        "agreement": "Agreement with Ctrl-G, with random HMMs",
        "position of a word": "Tokens before a word that must occur",
        "one word": "Overhead of steering",
        "automaton states": "A large automaton",
        "distilled": "The distilled HMM",
        "regular expression": "Automata of regular expressions",
    }
    return next((heading for part, heading in headings.items() if part in row), "Texts under constraints")


def _call_times(results: Results) -> list[list[str]]:
    """Return how many times longer Ctrl-G takes for each kind of call."""
    times = {row.name: row.mean("times_steered") for row in results["control"]}
    lines = [["", "Ctrl-G, eager", "Ctrl-G, compiled"]]
    for call in dict.fromkeys(name.partition("one call, ")[2] for name, value in times.items() if value):
        found = [times.get(f"Ctrl-G, {kind}, one call, {call}") for kind in ("eager", "compiled")]
        lines.append([call, *(f"× {value:.1f}" if value else "" for value in found)])
    return lines


CONTROL = Study(
    name="control",
    title="Steering a model of 15M parameters by an HMM distilled from it, beside Ctrl-G's own code",
    topic=topics.CONTROL,
    made_by="python -m benchmarks.control all",
    columns=("minutes",),
    part_of=_part_of_control,
    summaries=(
        Summary(
            "Calls beside Ctrl-G's",
            "The time of a call of Ctrl-G's processor as a multiple of that of `Steering`, in one run.",
            _call_times,
        ),
    ),
    headers={
        "satisfied": "satisfied",
        "log_prob_per_token": "log p per token",
        "feasible_log_prob_per_token": "log p per token where exact samples exist",
        "ms_per_token": "ms per token",
        "times_unconstrained": "× unconstrained",
        "times_with_setup": "× unconstrained, with set-up",
        "ms_per_call": "ms per call",
        "times_steered": "× steered",
        "setup_ms": "set-up, ms",
        "setup_s": "set-up, s",
        "request_s": "request, s",
        "compile_ms": "ms",
        "first_ms": "the first one of a tokenizer, ms",
        "largest_difference": "largest difference from ours",
        "largest_difference_of_steered": "of steered probabilities",
        "largest_difference_of_logs": "of log-probabilities",
        "tokens_before_the_word": "tokens before the word",
        "times_exact": "× exact",
        "constraints": "constraints",
        "feasible": "with exact samples",
        "table_gb": "tables, GB",
        "perplexity": "perplexity",
    },
)

# --- time and memory against the sizes of a model (benchmarks/curves.py) ---

AXES = {"states": "states", "sequence length": "length", "batch": "batch", "vocabulary": "vocab"}
BASES = {
    "cpu": {"states": 128, "batch": 16, "length": 32, "vocab": 4_000},
    "cuda": {"states": 1_024, "batch": 64, "length": 64, "vocab": 16_000},
}
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)


def point_name(axis: str, multiple: float) -> str:
    """Return the name of a row."""
    return f"{axis} × {multiple:g}"


def _curves(kind: Literal["time", "memory"], device: Literal["cpu", "cuda"]) -> Study:
    metric, axis = {"time": ("step_ms", "ms per step"), "memory": ("peak_memory_gb", "GB")}[kind]
    base = BASES[device]
    sizes = f"{base['states']:,} states, {base['batch']} × {base['length']} tokens, {base['vocab']:,} words"
    where: Literal["GPU", "CPU"] = "CPU" if device == "cpu" else "GPU"
    return Study(
        name=f"{kind}-curves-{device}",
        title=f"{kind.capitalize()} of a training step against its sizes, on the {where}",
        topic=topics.SPEED,
        device=where,
        made_by=f"python -m benchmarks.curves --device {device}",
        rows=tuple(
            StudyRow(
                name=point_name(name, multiple),
                settings=base | {field: int(base[field] * multiple)},
                series=name,
                x=multiple,
            )
            for name, field in AXES.items()
            for multiple in MULTIPLES
        ),
        drawing=Lines(metric, axis, f"multiple of the base model ({sizes})", tick="{:g}".format, slopes=True),
        headers={metric: axis, "tokens_per_second": "tokens/s"},
    )


CURVES = (_curves("time", "cpu"), _curves("memory", "cpu"), _curves("time", "cuda"), _curves("memory", "cuda"))
