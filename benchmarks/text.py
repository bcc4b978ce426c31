"""Speed of queries about text on a CPU: generation, steering, scores, states.

    python -m benchmarks.text
    python -m benchmarks.text --threads 1

Random models over 10,000 words (32,000 for steering), and 2,000 sentences with the lengths of PTB's (22 tokens on
average, `<eos>` included). It prints the best of several runs, in units per second of wall-clock time and of CPU time;
on a machine that does something else, use the latter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

import hmmlm
from hmmlm.constrain.automaton import containing
from hmmlm.data.words import WordTokenizer
from hmmlm.emissions import Blocked
from hmmlm.transitions import Factored

WORDS, SENTENCES, STEERED_WORDS = 10_000, 2_000, 32_000
Measurement = tuple[str, str, Callable[[], int]]  # model, what is measured, and a call that returns the number of units


def dense_model(states: int, words: int = WORDS) -> hmmlm.HMM:
    """Return a dense HMM with peaked random distributions."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((states,), (states, states), (states, words))
    return hmmlm.HMM(*((2 * torch.randn(shape, generator=generator)).log_softmax(-1) for shape in shapes))


def blocked_model(states: int, blocks: int, width: int = 256) -> hmmlm.HMM:
    """Return a blocked HMM with blocks of equally many words."""
    generator = torch.Generator().manual_seed(0)
    block = torch.arange(WORDS) % blocks
    u, w = (torch.randn(states, width, generator=generator) / width**0.25 for _ in range(2))
    log_normalizer = torch.cat([(piece @ w.t()).logsumexp(1) for piece in u.split(1024)])
    emission = 2 * torch.randn(WORDS, states // blocks, generator=generator)
    for number in range(blocks):
        emission[block == number] = emission[block == number].log_softmax(0)
    return hmmlm.HMM(
        torch.randn(states, generator=generator).log_softmax(0),
        Factored(u, w, log_normalizer),
        Blocked(emission, block, blocks),
    )


def with_words(hmm: hmmlm.HMM) -> hmmlm.LanguageModel:
    words = ["<unk>", "<eos>", *(f"w{i}" for i in range(WORDS - 2))]
    return hmmlm.LanguageModel(hmm, WordTokenizer(words), {"batches": {"kind": "stream", "eval_reset_at_eos": True}})


def sentences() -> list[str]:
    """Return sentences with Zipfian words and the lengths of PTB's."""
    generator = np.random.default_rng(0)
    probs = 1 / np.arange(1, WORDS - 1)
    lengths = np.clip(generator.gamma(3.2, 6.6, SENTENCES).astype(int), 1, 82)
    drawn = (generator.choice(WORDS - 2, size=length, p=probs / probs.sum()) for length in lengths)
    return [" ".join(f"w{i}" for i in line) for line in drawn]


def measurements() -> Iterator[Measurement]:
    texts = sentences()
    models = {
        "dense, 512 states": dense_model(512),
        "blocked, 512 states": blocked_model(512, 32),
        "blocked, 2^15 states": blocked_model(2**15, 128),
    }
    for name, hmm in models.items():
        lm = with_words(hmm)
        for num in (1, 64):
            yield name, f"tokens, {num} samples", lambda lm=lm, num=num: count(lm.generate(seed=1, num_samples=num))
        few = 16 if hmm.num_states > 10_000 else 64
        yield (
            name,
            f"tokens, {few} samples, temperature 0.8",
            lambda lm=lm, few=few: count(lm.generate(seed=1, num_samples=few, temperature=0.8, max_new_tokens=10)),
        )
    for name, hmm in {
        "dense, 64 states": dense_model(64),
        "blocked, 512 states": models["blocked, 512 states"],
    }.items():
        lm = with_words(hmm)
        yield name, "sentences, lm.score", lambda lm=lm: len(lm.score(texts))
        yield name, "sentences, lm.token_scores", lambda lm=lm: len(lm.token_scores(texts))
        batches = [hmmlm.padded([lm.encode(text) for text in part]) for part in by_length(texts)]
        for query in ("log_likelihood", "posterior", "viterbi"):
            yield (
                name,
                f"sentences, hmm.{query}",
                lambda query=query, hmm=hmm, batches=batches: sum(len(b[0]) for b in batches if run(hmm, query, b)),
            )
    guide = hmmlm.Guide(dense_model(1024, STEERED_WORDS), containing([5, 6], STEERED_WORDS), 20)
    position = guide.begin()
    yield "dense, 1,024 × 32,000", "calls of guide.chances", lambda: len([guide.log_probs_accept(position)])
    weights, matrix = torch.rand(1, 1024), torch.rand(1024, STEERED_WORDS)
    yield "[1, 1024] × [1024, 32000]", "products", lambda: len(weights @ matrix)


def by_length(texts: list[str]) -> list[list[str]]:
    """Return texts in batches of 200 of similar length."""
    ordered = sorted(texts, key=lambda text: len(text.split()))
    return [ordered[i : i + 200] for i in range(0, len(ordered), 200)]


def run(hmm: hmmlm.HMM, query: str, batch: tuple[torch.Tensor, torch.Tensor]) -> bool:
    with torch.no_grad():
        getattr(hmm, query)(*batch)
    return True


def count(texts: list[str]) -> int:
    """Return the number of tokens of samples, their last one included."""
    return sum(len(text.split()) + 1 for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.threads is not None:
        hmmlm.set_threads(options.threads)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'model':28}{'unit':42}{'per second':>14}{'per CPU second':>16}")
    for model, what, call in measurements():
        call()
        best = [0.0, 0.0]
        for _ in range(options.repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            units = call()
            rates = units / (time.perf_counter() - wall), units / (time.process_time() - cpu)
            best = [max(pair) for pair in zip(best, rates, strict=True)]
        print(f"{model:28}{what:42}{best[0]:14,.0f}{best[1]:16,.0f}", flush=True)


if __name__ == "__main__":
    main()
