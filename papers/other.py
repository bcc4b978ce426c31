"""Measurements of the library that are not about a table or figure of a paper."""

from __future__ import annotations

from papers.study import Study

BLOCKED_CPU = Study(
    name="blocked-cpu",
    title="The blocked scan on the CPU: tiles shared by steps, beside one tile per step",
    device="CPU",
    made_by="python -m benchmarks.blocked_cpu",
    headers={"as_it_comes_ms": "shared tiles, ms", "a_tile_a_step_ms": "one tile per step, ms"},
)
STEERING = Study(
    name="steering",
    title="A language model steered to a word, beside the exact answer",
    device="CPU",
    made_by="python -m benchmarks.steering",
    headers={"log_probability_a_token": "log probability per token"},
)
CPU_DEFAULT = Study(
    name="cpu-default",
    title="Settings for two CPU cores: 1 MB of English and Penn Treebank",
    device="CPU",
    trials=True,
    made_by="hmmlm train, with the commands in the records",
    headers={
        "ngram_test_perplexity": "5-gram, test",
        "mixture_valid_perplexity": "HMM + 5-gram, valid",
        "mixture_test_perplexity": "HMM + 5-gram, test",
    },
)
