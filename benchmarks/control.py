"""Measure steering: time per call, texts under four kinds of constraints, a large automaton; beside Ctrl-G's own code.

    python -m benchmarks.control calls --ctrl-g CTRLG --out results/control.json
    python -m benchmarks.control texts MODEL RUN --ctrl-g CTRLG --constraints 200 --out results/control.json
    python -m benchmarks.control overhead MODEL RUN --out results/control.json
    python -m benchmarks.control large --out results/control.json

MODEL is a causal model of transformers, RUN a model of hmmlm with the same tokenizer, CTRLG a checkout of
github.com/joshuacnf/Ctrl-G (optional; eager unless --compile). `calls` uses random HMMs. `texts` takes its constraints
from texts that the model generates: three of their words in any order, a regular expression, their beginning and end,
their number of words; "rejection" draws texts without a constraint and keeps those that satisfy it.
"""

# ruff: noqa: B023 (functions of a loop are called in it)

import argparse
import contextlib
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hmmlm
from hmmlm import HMM, Automaton, Guide, LanguageModel, Steering
from hmmlm.hmm.automaton import anything, containing
from hmmlm.hmm.constraints import Position
from papers.records import add_record, commit, machine

WORDS = 32_000
END = 2


class Recorder:
    """Prints rows of results and adds them to a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        named = [
            f"--{name.replace('_', '-')} {value}"
            for name, value in vars(options).items()
            if name in ("constraints", "rows", "length")
        ]
        self._command = " ".join(
            [
                "python -m benchmarks.control",
                options.part,
                *(["MODEL RUN"] if options.part in ("texts", "overhead") else []),
                *named,
            ]
        )

    def add(self, row: str, metrics: dict[str, float], **settings: Any) -> None:
        metrics = {name: float(f"{value:.4g}") for name, value in metrics.items()}
        print(f"{row:40}", settings, metrics, flush=True)
        if self._options.out is None:
            return
        record = {
            "row": row,
            "recipe": "benchmarks/control.py",
            "seed": self._options.seed,
            "metrics": metrics,
            "settings": settings,
            "command": self._command,
            "commit": commit(),
            "machine": machine(self._options.device == "cuda"),
            "date": time.strftime("%Y-%m-%d"),
        }
        add_record(self._options.out, record)


def random_model(states: int, device: str, seed: int = 0) -> HMM:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (3 * torch.randn(*shape, generator=generator)).log_softmax(-1).to(device)

    return HMM(draw(states), draw(states, states), draw(states, WORDS))


class CtrlG:
    """The processors of Ctrl-G, with our automata as its DFAs."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        if not compiled:
            import torch._dynamo

            torch._dynamo.config.disable = True
        sys.path.insert(0, str(folder))
        import ctrlg  # type: ignore[import-not-found]

        self._ctrlg = ctrlg

    def model(self, hmm: HMM) -> Any:
        dense = hmm.dense()
        model = self._ctrlg.HMM(hmm.states, hmm.vocab_size, END)
        model.update_params(dense.log_transition.exp(), dense.log_emission, dense.log_start)
        return model.to(hmm.device)

    def processor(
        self, model: Any, automaton: Automaton, length: int, prompt: list[int], read: list[int], end: int
    ) -> Any:
        """Return a processor for lines that `automaton` accepts, then `end`, within `length` tokens."""
        lines = automaton.without(end).minimized()
        edges, masks = lines.edges, []
        for number, (source, target) in enumerate(zip(edges.source.tolist(), edges.target.tolist(), strict=True)):
            here = (edges.of_cell[source] == number)[lines.class_of]
            masks.append((source, target, here.numpy()))
        graph = {
            "edges": masks,
            "initial_state": 0,
            "accept_states": set(lines.accepting.nonzero()[:, 0].tolist()),
        }
        dfa = self._ctrlg.DFAModel(graph, lines.vocab_size).to(model.alpha_exp.device)
        return self._ctrlg.ConstraintLogitsProcessor(
            model, dfa, 0, length - 1, prompt_ids=prompt, prefix_ids=read, suffix_ids=[end]
        )


def seconds(call: Callable[[], Any], device: str) -> float:
    """Return the duration of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_calls(options: argparse.Namespace) -> None:
    """Time processors of random HMMs for one and three keyphrases, and compare their probabilities with Ctrl-G's."""
    recorder, device, length = Recorder(options), options.device, options.length
    theirs = CtrlG(options.ctrl_g, options.compile) if options.ctrl_g else None
    for states in options.states:
        hmm = random_model(states, device)
        their_model = theirs.model(hmm) if theirs else None
        for phrases in (1, 3):
            line = anything(WORDS)
            for number in range(phrases):
                line &= containing([100 + 10 * number, 101 + 10 * number], WORDS)
            for count in options.batches:
                ids = torch.tensor([[1]] * count, device=device)
                texts = torch.randint(10, 1000, (count, options.calls), generator=torch.Generator().manual_seed(0))
                texts = texts.to(device)
                scores = torch.randn(count, WORDS, device=device).log_softmax(1)
                makers: dict[str, Callable[[], Any]] = {
                    "steered": lambda line=line: Steering(guide := Guide(hmm, line.until(END), length), guide.begin())
                }
                if theirs:
                    name = f"Ctrl-G, {'compiled' if options.compile else 'eager'}"
                    makers[name] = lambda line=line: theirs.processor(their_model, line, length, [1], [], END)  # type: ignore[misc]
                results: dict[str, Tensor] = {}
                for name, make in makers.items():
                    kept: list[Any] = []
                    make()  # compiles
                    setup = seconds(lambda make=make, kept=kept: kept.append(make()), device)
                    times = []
                    for step in range(options.calls):
                        given = torch.cat([ids, texts[:, :step]], 1)
                        with torch.no_grad():
                            times.append(seconds(lambda: results.__setitem__(name, kept[0](given, scores)), device))
                    metrics = {"ms_per_call": 1e3 * sorted(times[2:])[len(times[2:]) // 2], "setup_ms": 1e3 * setup}
                    if name != "steered":
                        ours, other = results["steered"].exp(), results[name].exp()
                        metrics["largest_difference"] = float((ours - other).abs().max())
                    recorder.add(name, metrics, states=states, phrases=phrases, rows=count, length=length)


def measure_large(options: argparse.Namespace) -> None:
    """Time a request with an automaton of 5,000 automaton states and 64 tokens."""
    recorder, generator = Recorder(options), torch.Generator().manual_seed(0)
    size, classes = 5000, 40
    # Mostly forward, as the automata of long expressions are: three targets for each automaton state.
    targets = (torch.arange(size)[:, None] + torch.randint(1, 200, (size, 3), generator=generator)) % size
    table = targets.gather(1, torch.randint(0, 3, (size, classes), generator=generator))
    automaton = Automaton.of_classes(
        table, torch.randint(0, classes, (WORDS,), generator=generator), torch.arange(size) % 50 == 0
    ).until(END)
    for states in options.states:
        hmm = random_model(states, options.device)
        kept: list[Guide] = []
        Guide(hmm, automaton, 2)  # keeps what does not depend on the length
        setup = seconds(lambda: kept.append(Guide(hmm, automaton, 64)), options.device)
        steering = Steering(kept[0], kept[0].begin())
        ids, scores = torch.tensor([[1]]), torch.zeros(1, WORDS, device=options.device)

        def request() -> None:
            nonlocal ids
            for _ in range(16):
                token = steering(ids.to(options.device), scores).argmax(1).cpu()
                ids = torch.cat([ids, token[:, None]], 1)

        spent = seconds(request, options.device)
        rows = sum(len(each.log_probs) for each in kept[0]._ahead)
        metrics = {"setup_s": setup, "ms_per_token": 1e3 * spent / 16, "table_gb": rows * states * 4e-9}
        recorder.add("steered, 5,000 automaton states", metrics, states=states, length=64)


class Writer:
    """A language model that generates lines."""

    def __init__(self, options: argparse.Namespace) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(options.model).to(options.device).eval()
        self.lm: LanguageModel = hmmlm.load(options.run, options.device)
        self.device, self.end = options.device, self.lm.tokenizer.eos_id
        bos = self.model.config.bos_token_id
        self._first = [] if bos is None else [bos]

    def ids(self, prompt: str) -> list[int]:
        return [*self._first, *self.lm.tokenizer.encode(prompt)]

    def write(self, prompt: str, length: int, rows: int, *processors: Any) -> tuple[list[list[int]], float]:
        """Return continuations, each up to its end, and the duration."""
        ids = torch.tensor([self.ids(prompt)], device=self.device)
        kept: list[Tensor] = []

        def generate() -> None:
            options = {"do_sample": True, "top_k": 0, "num_return_sequences": rows, "max_new_tokens": length}
            ends = {"eos_token_id": self.end, "pad_token_id": self.end}
            kept.append(self.model.generate(ids, logits_processor=list(processors), **options, **ends))

        spent = seconds(generate, self.device)
        new = kept[0][:, ids.shape[1] :].tolist()
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in new], spent

    @torch.no_grad()
    def log_prob(self, prompt: str, rows: list[list[int]]) -> float:
        """Return the log-probability of continuations under the model, summed."""
        start, total = self.ids(prompt), 0.0
        for row in rows:
            ids = torch.tensor([[*start, *row]], device=self.device)
            logits = self.model(ids[:, :-1]).logits[0, len(start) - 1 :].float().log_softmax(-1)
            total += float(logits.gather(1, ids[0, len(start) :, None]).sum())
        return total


def draw_constraints(writer: Writer, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield kinds, prompts and constraints, from texts that the model generates."""
    generator, length = random.Random(options.seed), options.length
    kinds = ("three words", "regex", "infilling", "number of words")
    texts: list[str] = []
    while len(texts) < options.constraints:
        rows, _ = writer.write(options.prompt, length // 2, 32)
        decoded = [writer.lm.tokenizer.decode([t for t in row if t != writer.end]) for row in rows]
        texts += [" ".join(text.split()) for text in decoded if len(re.findall(r"\b[a-z]{3,}\b", text)) >= 6]
    for number, text in enumerate(texts[: options.constraints]):
        words, kind = re.findall(r"\b[a-z]{3,}\b", text), kinds[number % 4]
        if kind == "three words":
            yield kind, options.prompt, {"must": generator.sample(sorted(set(words)), 3)}
        elif kind == "regex":
            one, two = generator.sample(words, 2)
            yield (
                kind,
                options.prompt,
                {"regex": rf"[^.]*\b{one}".replace(r"\b", " ") + rf"[a-z]*[^.]*\. [A-Z][a-z]+ .*{two}.*\."},
            )
        elif kind == "infilling":
            split = text.split()
            yield kind, options.prompt, {"suffix": " ".join(split[-4:])}
        else:
            count = len(text.split())
            yield kind, options.prompt, {"words": (count, count + 2)}


def measure_texts(options: argparse.Namespace) -> None:
    """Generate under constraints: steered, masked, by Ctrl-G and by rejection."""
    writer, recorder = Writer(options), Recorder(options)
    torch.manual_seed(options.seed)
    theirs = CtrlG(options.ctrl_g, options.compile) if options.ctrl_g else None
    their_model = theirs.model(writer.lm.hmm.dense()) if theirs else None
    length, rows, lm = options.length, options.rows, writer.lm
    free = [writer.write(options.prompt, length, rows) for _ in range(4)]
    tokens = sum(len(row) for texts, _ in free for row in texts)
    log_prob = sum(writer.log_prob(options.prompt, texts) for texts, _ in free)
    plain_ms = 1e3 * sum(spent for _, spent in free) / tokens
    recorder.add(
        "unconstrained",
        {"log_prob_per_token": log_prob / tokens, "ms_per_token": plain_ms},
        rows=rows,
        new_tokens=length,
    )
    pool = (
        [row for _ in range(max(1, options.pool // 100)) for row in writer.write(options.prompt, length, 100)[0]]
        if options.pool
        else []
    )
    totals: dict[tuple[str, str], list[float]] = {}
    for kind, prompt, constraint in draw_constraints(writer, options):
        kept: list[tuple[Guide, Position]] = []
        with contextlib.suppress(hmmlm.InputError):  # a text that cannot be repeated within the length
            spent_guide = seconds(
                lambda c=constraint, p=prompt, k=kept: k.append(lm.guide(prompt=p, max_new_tokens=length, **c)),
                options.device,
            )
        if not kept:
            continue
        guide, position = kept[0]
        ways: dict[str, Callable[[], Any]] = {
            "steered": lambda: Steering(guide, position),
            "masked": lambda: Steering(guide, position, weight=0.0),
        }
        if theirs:
            read = lm.tokenizer.encode(prompt)
            line = guide.automaton.starting_at(position.automaton)
            ways["Ctrl-G"] = lambda: theirs.processor(
                their_model, before_end(line, writer.end), length, writer.ids(prompt), read, writer.end
            )  # type: ignore[union-attr]
        for way, make in ways.items():
            made: list[Any] = []
            setup = seconds(lambda make=make, made=made: made.append(make()), options.device) + (
                spent_guide if way != "Ctrl-G" else 0
            )
            texts, spent = writer.write(prompt, length, rows, made[0])
            good = [text for text in texts if guide.automaton.accepting[guide.automaton.read(text, position.automaton)]]
            add(
                totals,
                (way, kind),
                len(texts),
                len(good),
                sum(map(len, texts)),
                writer.log_prob(prompt, texts),
                spent,
                setup,
            )
        good = [text for text in pool if guide.automaton.accepting[guide.automaton.read(text, position.automaton)]]
        if good:
            add(
                totals,
                ("rejection", kind),
                len(pool),
                len(good),
                sum(map(len, good)),
                writer.log_prob(prompt, good),
                0.0,
                0.0,
            )
    for (way, kind), (texts_, good_, tokens_, log_prob_, spent_, setup_, count) in totals.items():
        metrics = {"satisfied": good_ / texts_, "log_prob_per_token": log_prob_ / tokens_}
        if way != "rejection":
            per_token = 1e3 * spent_ / tokens_
            metrics |= {
                "ms_per_token": per_token,
                "times_unconstrained": per_token / plain_ms,
                "setup_ms": 1e3 * setup_ / count,
            }
        else:
            metrics["ms_per_token"] = plain_ms * texts_ / good_
        recorder.add(f"{way}, {kind}", metrics, constraints=int(count), rows=rows, new_tokens=length)


def before_end(automaton: Automaton, end: int) -> Automaton:
    """Return the automaton of what may precede `end`, of one that accepts it with `end`."""
    after = automaton.by_class[:, automaton.class_of[end]].long()
    return Automaton.of_classes(automaton.by_class, automaton.class_of, automaton.accepting[after])


def add(totals: dict[tuple[str, str], list[float]], key: tuple[str, str], *values: float) -> None:
    before = totals.setdefault(key, [0.0] * (len(values) + 1))
    totals[key] = [a + b for a, b in zip(before, (*values, 1), strict=True)]


def measure_overhead(options: argparse.Namespace) -> None:
    """Time generation with and without steering, for one word that must occur."""
    writer, recorder, length = Writer(options), Recorder(options), options.length
    guide, position = writer.lm.guide(must=["dinosaur"], prompt=options.prompt, max_new_tokens=length)
    times: dict[str, list[float]] = {"unconstrained": [], "steered": []}
    for number in range(options.repeats + 1):
        for name, spent in times.items():
            torch.manual_seed(number)
            processors = [Steering(guide, position)] if name == "steered" else []
            texts, duration = writer.write(options.prompt, length, options.rows, *processors)
            if number:  # the first one warms up
                spent.append(1e3 * duration / max(map(len, texts)))
    plain, steered = (sorted(spent)[len(spent) // 2] for spent in times.values())
    recorder.add("unconstrained, one word", {"ms_per_token": plain}, rows=options.rows, states=guide.hmm.states)
    metrics = {"ms_per_token": steered, "times_unconstrained": steered / plain}
    recorder.add("steered, one word", metrics, rows=options.rows, states=guide.hmm.states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--out", type=Path)
    common.add_argument("--ctrl-g", type=Path, help="a checkout of Ctrl-G")
    common.add_argument("--compile", action="store_true", help="let Ctrl-G compile its functions")
    common.add_argument("--length", type=int, default=40, help="new tokens")
    texts = argparse.ArgumentParser(add_help=False)
    texts.add_argument("model")
    texts.add_argument("run", type=Path)
    texts.add_argument("--prompt", default="Once upon a time")
    texts.add_argument("--rows", type=int, default=4, help="texts of a constraint")
    calls = parts.add_parser("calls", parents=[common])
    calls.add_argument("--states", type=int, nargs="+", default=[64, 256, 1024, 4096])
    calls.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    calls.add_argument("--calls", type=int, default=10)
    large = parts.add_parser("large", parents=[common])
    large.add_argument("--states", type=int, nargs="+", default=[256, 1024])
    constrained = parts.add_parser("texts", parents=[common, texts])
    constrained.add_argument("--constraints", type=int, default=200)
    constrained.add_argument("--pool", type=int, default=2000, help="texts of rejection sampling")
    overhead = parts.add_parser("overhead", parents=[common, texts])
    overhead.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    {"calls": measure_calls, "large": measure_large, "texts": measure_texts, "overhead": measure_overhead}[
        options.part
    ](options)


if __name__ == "__main__":
    main()
