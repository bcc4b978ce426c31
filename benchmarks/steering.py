"""Measure the text of a language model steered by HMMs, compared with exact samples given the constraint.

    python -m benchmarks.steering MODEL NAME=RUN [NAME=RUN ...] --prompt "Once upon a time" --words dog tree

MODEL is a causal model of transformers, each RUN a model of hmmlm with the same tokenizer. For every word, each HMM
guides continuations of the prompt to contain it. Many continuations are also sampled without guidance: those that
contain the word are exact samples given the constraint, which is feasible for likely words. The report has the mean
log-probability per token of the continuations under MODEL (up to their end), the fraction with the word, and the number
of tokens before it. --out writes means over the words as records of a study (results/steering.json).
"""

import argparse
import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import hmmlm
from hmmlm import Automaton, LanguageModel
from papers.records import commit, machine


def cut(row: list[int], end: int) -> list[int]:
    """Return the row up to and including the first `end` token."""
    return row[: row.index(end) + 1] if end in row else row


def place_of(automaton: Automaton, state: int, row: list[int]) -> int | None:
    """Return the index of the token from which the row is accepted up to its end; None if it is not accepted."""
    place, before = None, False
    for number, token in enumerate(row):
        state = automaton.read([token], state)
        now = bool(automaton.accepting[state])
        place = number if now and not before else place
        before = now
    return place if before else None


@torch.no_grad()
def log_probability(model: Any, prompt: Tensor, rows: list[list[int]]) -> float:
    """Return the mean log-probability per token of the continuations `rows` of prompt [1, T]."""
    total, tokens = 0.0, 0
    for row in rows:
        ids = torch.cat([prompt, torch.tensor([row])], 1)
        logits = model(ids[:, :-1]).logits[0, prompt.shape[1] - 1 :].log_softmax(-1)
        total += float(logits.gather(1, torch.tensor(row)[:, None]).sum())
        tokens += len(row)
    return total / tokens


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw and score texts for every word, with each HMM and by rejection; return one result per word and method."""
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    hmms: dict[str, LanguageModel] = {}
    for pair in options.hmms:
        name, folder = pair.split("=", 1)
        hmms[name] = hmmlm.load(folder)
    tokenizer = next(iter(hmms.values())).tokenizer
    first = [] if model.config.bos_token_id is None else [model.config.bos_token_id]
    prompt, end, length = torch.tensor([[*first, *tokenizer.encode(options.prompt)]]), tokenizer.eos_id, options.length

    def draw(count: int, *processors: Any) -> list[list[int]]:
        rows = model.generate(
            prompt,
            logits_processor=list(processors),
            max_new_tokens=length,
            do_sample=True,
            top_k=0,
            num_return_sequences=count,
            eos_token_id=end,
            pad_token_id=end,
        )
        return [cut(row, end) for row in rows[:, prompt.shape[1] :].tolist()]

    torch.manual_seed(options.seed)
    plain = [row for _ in range(options.plain // 100) for row in draw(100)]
    results: list[dict[str, Any]] = []

    def report(word: str, name: str, rows: list[list[int]], **more: float) -> None:
        facts = {"log_probability_a_token": log_probability(model, prompt, rows), **more, "texts": len(rows)}
        results.append({"word": word, "name": name, "metrics": facts})
        print(f"{word:8} {name:20}", ", ".join(f"{key} {value:.3f}" for key, value in facts.items()), flush=True)

    report("", "no constraint", plain[: options.samples])
    for word in options.words:
        guides = {
            name: lm.guide(must=[word], max_new_tokens=length, prompt=options.prompt, require_eos=False)
            for name, lm in hmms.items()
        }
        guide, position = next(iter(guides.values()))
        found = partial(place_of, guide.automaton, position.automaton)
        drawn = {"exact, by rejection": plain}
        drawn |= {name: draw(options.samples, hmmlm.Steering(*guided)) for name, guided in guides.items()}
        for name, rows in drawn.items():
            having = {number: place for number, row in enumerate(rows) if (place := found(row)) is not None}
            if not having:
                raise SystemExit(f"none of {len(rows)} texts has {word!r}: raise --plain or remove it from --words")
            chosen = [rows[number] for number in having][: options.samples]
            places = sum(having.values()) / len(having)
            report(word, name, chosen, share_with_the_word=len(having) / len(rows), tokens_before_the_word=places)
    return results


def main() -> None:
    """Print the results and their means over words, and write the means to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("hmms", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--words", nargs="+", default=["dog", "tree", "mom", "garden", "happy"])
    parser.add_argument("--length", type=int, default=40, help="maximum number of new tokens")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--plain", type=int, default=2000, help="number of texts without guidance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options)
    settings = {"prompt": options.prompt, "words": " ".join(options.words), "new_tokens": options.length}
    hmms = " ".join(shlex.quote(f"{pair.split('=')[0]}=RUN") for pair in options.hmms)
    command = f"python -m benchmarks.steering MODEL {hmms} --samples {options.samples} --plain {options.plain}"
    records = []
    for name in dict.fromkeys(r["name"] for r in results):
        metrics = mean([r["metrics"] for r in results if r["name"] == name])
        print(f"{name:20} {metrics}")
        records.append(
            {
                "row": name,
                "recipe": "benchmarks/steering.py",
                "seed": options.seed,
                "metrics": metrics,
                "settings": settings,
                "command": command,
                "commit": commit(),
                "machine": machine(False),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    if options.out:
        options.out.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over words."""
    return {key: round(sum(each[key] for each in metrics) / len(metrics), 3) for key in metrics[0]}


if __name__ == "__main__":
    main()
