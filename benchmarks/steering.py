"""How good is the text of a language model that HMMs steer? Beside the exact answer, which for likely words can be had.

    python benchmarks/steering.py MODEL NAME=RUN [NAME=RUN ...] --prompt "Once upon a time" --words dog tree

MODEL is a causal model of transformers, each RUN a model of hmmlm with its tokenizer. For every word, continuations of
the prompt that have it are drawn under each HMM's guidance, and many without any: those of them that have the word are
draws from the model given the constraint. Reported are the mean log-probability a token that MODEL gives to the
continuations, up to their end, and the share of them that has the word.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import hmmlm
from hmmlm import Automaton, LanguageModel


def cut(row: list[int], end: int) -> list[int]:
    """Up to the end of the line, and with it."""
    return row[: row.index(end) + 1] if end in row else row


@torch.no_grad()
def log_probability(model: Any, prompt: Tensor, rows: list[list[int]]) -> float:
    """Mean a token of the continuations `rows` of prompt [1, T]."""
    total, tokens = 0.0, 0
    for row in rows:
        ids = torch.cat([prompt, torch.tensor([row])], 1)
        logits = model(ids[:, :-1]).logits[0, prompt.shape[1] - 1 :].log_softmax(-1)
        total += float(logits.gather(1, torch.tensor(row)[:, None]).sum())
        tokens += len(row)
    return total / tokens


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
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
            prompt, logits_processor=list(processors), max_new_tokens=length, do_sample=True, top_k=0,
            num_return_sequences=count, eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        return [cut(row, end) for row in rows[:, prompt.shape[1] :].tolist()]

    torch.manual_seed(options.seed)
    plain = [row for _ in range(options.plain // 100) for row in draw(100)]
    results: list[dict[str, Any]] = []

    def report(word: str, name: str, rows: list[list[int]], share: float, **more: float) -> None:
        value = log_probability(model, prompt, rows) if rows else float("nan")
        facts = {"word": word, "name": name, "log_probability": value, "texts": len(rows), "share": share}
        results.append({**facts, **more})
        print(f"{word:12} {name:24} {value:8.3f} a token, {len(rows):4} texts, {100 * share:5.1f}% have it", flush=True)

    report("", "no constraint", plain[: options.samples], 1.0)
    for word in options.words:
        guides = {
            name: lm.guide(must=[word], max_new_tokens=length, prompt=options.prompt, ended=False)
            for name, lm in hmms.items()
        }
        guide, position = next(iter(guides.values()))
        automaton, start = guide.automaton, position.automaton

        def has(row: list[int], automaton: Automaton = automaton, start: int = start) -> bool:
            return bool(automaton.accepting[automaton.read(row, start)])

        exact = [row for row in plain if has(row)]
        report(word, "exact, by rejection", exact[: options.samples], len(exact) / len(plain))
        for name, guided in guides.items():
            began = time.perf_counter()
            rows = draw(options.samples, hmmlm.Steering(*guided))
            seconds = time.perf_counter() - began
            report(word, name, rows, sum(map(has, rows)) / len(rows), seconds=round(seconds, 2))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("hmms", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--words", nargs="+", default=["dog", "tree", "mom", "garden", "happy"])
    parser.add_argument("--length", type=int, default=40, help="new tokens")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--plain", type=int, default=2000, help="texts without guidance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options)
    print(f"{'mean over words':37}")
    for name in dict.fromkeys(r["name"] for r in results):
        values = [r["log_probability"] for r in results if r["name"] == name]
        print(f"{'':12} {name:24} {sum(values) / len(values):8.3f}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
