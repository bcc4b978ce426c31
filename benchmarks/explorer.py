"""Measure the explorer: seconds of each request, for a dense model of 512 states and a blocked one of 2^15.

    python -m benchmarks.explorer

The models are random, with 10,000 words; the page asks for the same through HTTP, which adds about a millisecond.
"""

import json
import time
from collections.abc import Callable

import torch

from hmmlm.data.words import WordTokenizer
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.explorer.endpoints import answer
from hmmlm.explorer.explorer import Explorer
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.transitions import Factored

WORDS = 10_000


def requests(first: int) -> dict[str, dict[str, object]]:
    """Return a request of each kind; others for another first word."""
    words = [f"word{first + 17 * i}" for i in range(20)]
    text = " ".join(words)
    return {
        "sentence": {"text": text},
        "blank": {"text": text, "position": 7},
        "search": {"word": words[0]},
        "state": {"state": first},
        "generate": {"prompt": words[0], "seed": first},
        "generate, constrained": {"prompt": words[0], "seed": first, "constraints": {"must": [words[1]]}},
        "fill": {"text": f"{words[0]} ___ {words[1]}"},
    }


def dense(states: int, draw: Callable[..., torch.Tensor]) -> HMM:
    return HMM(*(draw(*size).log_softmax(-1) for size in ((states,), (states, states), (states, WORDS))))


def blocked(states: int, draw: Callable[..., torch.Tensor], blocks: int = 128, width: int = 64) -> HMM:
    u, w, block_of_word = draw(states, width), draw(states, width), torch.arange(WORDS) % blocks
    normalizer = torch.cat([(rows @ w.t()).logsumexp(1) for rows in u.split(2**10)])
    log_emission = draw(WORDS, states // blocks)
    for block in range(blocks):
        own = block_of_word == block
        log_emission[own] = log_emission[own].log_softmax(0)
    transition, emission = Factored(u, w, normalizer), Blocked(log_emission, block_of_word, blocks)
    return HMM(draw(states).log_softmax(0), transition, emission)


def measure(hmm: HMM) -> dict[str, float | str]:
    """Return the seconds of each request, after another one of its kind, or why it is refused."""
    explorer = Explorer(LanguageModel(hmm, WordTokenizer(["<unk>", "<eos>", *map("word{}".format, range(WORDS - 2))])))
    explorer.layout.exception()  # waits for the map
    seconds: dict[str, float | str] = {}
    for name, fields in requests(5).items():
        endpoint = name.partition(",")[0]
        try:
            answer(explorer, endpoint, requests(300)[name])
        except InputError as error:
            seconds[name] = str(error)
            continue
        began = time.perf_counter()
        answer(explorer, endpoint, fields)
        seconds[name] = round(time.perf_counter() - began, 3)
    explorer.close()
    return seconds


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    for name, hmm in (("512 states", dense(512, draw)), ("2^15 states", blocked(2**15, draw))):
        print(json.dumps({name: measure(hmm)}), flush=True)


if __name__ == "__main__":
    main()
