"""Measure steering: time per call, texts under four kinds of constraints, a large automaton; beside Ctrl-G's own code.

    python -m benchmarks.control agreement --ctrl-g CTRLG --out results/control.json
    python -m benchmarks.control calls --ctrl-g CTRLG --out results/control.json
    python -m benchmarks.control texts MODEL RUN --ctrl-g CTRLG --constraints 200 --out results/control.json
    python -m benchmarks.control positions MODEL RUN --out results/control.json
    python -m benchmarks.control overhead MODEL RUN --out results/control.json
    python -m benchmarks.control large --out results/control.json
    python -m benchmarks.control regexes MODEL RUN --out results/control.json
    python -m benchmarks.control all MODEL RUN --ctrl-g CTRLG --budget 500 --out results/control.json

MODEL is a causal model of transformers, RUN a model of hmmlm with the same tokenizer, CTRLG a checkout of
github.com/joshuacnf/Ctrl-G (eager unless --compile; optional except for `agreement`). `agreement` and `calls` use
random HMMs. `texts` takes its constraints from texts that the model generates: three of their words in any order, a
regular expression, their beginning and end, their number of words; "rejection" draws texts without a constraint and
keeps those that satisfy it, and particles are drawn by their weights.
`positions` counts the tokens before a word that must occur, `regexes` times automata over the tokens of RUN. `all`
measures all --parts, each until its share of --budget seconds is spent, and distils MODEL into the new folder RUN for
those that need it; results are written as they come.
"""

# ruff: noqa: B023 (functions of a loop are called in it)

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hmmlm
from hmmlm import HMM, Automaton, Guide, LanguageModel, Steering
from hmmlm.constrain.automaton import anything, at_least, containing
from hmmlm.constrain.guide import Position
from hmmlm.constrain.particles import Particles
from papers.records import add_record, commit, machine

WORDS = 32_000
END = 2
KINDS = ("three words", "regex", "infilling", "number of words")
REGEXES = (r"[A-Z][a-z]+ (is|was) .*", r"\d{3}-\d{4}", r"[A-Z].*\. The .*")


class Recorder:
    """Prints rows of results and adds them to a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        named = [
            f"--{name.replace('_', '-')} {value}"
            for name, value in vars(options).items()
            if name in ("constraints", "rows", "length", "calls")
        ]
        self._command = " ".join(
            [
                "python -m benchmarks.control",
                options.part,
                *(["MODEL RUN"] if options.part in ("texts", "overhead", "positions", "regexes") else []),
                *named,
            ]
        )

    def add(self, row: str, metrics: dict[str, float], **settings: Any) -> None:
        metrics = {name: float(f"{value:.4g}") for name, value in metrics.items()}
        row += ", CPU" if self._options.device == "cpu" else ""
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
            from torch import _dynamo

            _dynamo.config.disable = True
        sys.path.insert(0, str(folder))
        precision = torch.get_float32_matmul_precision()
        import ctrlg  # type: ignore[import-not-found]

        torch.set_float32_matmul_precision(precision)  # the import allows TF32, also for the other ways
        self._ctrlg = ctrlg

    def model(self, hmm: HMM) -> Any:
        model = self._ctrlg.HMM(hmm.num_states, hmm.vocab_size, END)
        model.update_params(hmm.transition.dense().exp(), hmm.emission.dense(), hmm.log_start)
        return model.to(hmm.device)

    def processor(
        self, model: Any, automaton: Automaton, length: int, prompt: list[int], read: list[int], end: int | None = None
    ) -> Any:
        """Return a processor for `length` accepted tokens; with `end`, for fewer, then `end`."""
        lines = automaton.minimized() if end is None else automaton.without(end).minimized()
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
        least, most, suffix = (length, length, []) if end is None else (0, length - 1, [end])
        return self._ctrlg.ConstraintLogitsProcessor(
            model, dfa, least, most, prompt_ids=prompt, prefix_ids=read, suffix_ids=suffix
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
    if options.calls > length - 10:
        sys.exit(
            f"--calls {options.calls}: at most {length - 10}, so that three phrases can follow within {length} tokens"
        )
    theirs = CtrlG(options.ctrl_g, options.compile) if options.ctrl_g else None
    for states in options.states:
        hmm = random_model(states, device)
        their_model = theirs.model(hmm) if theirs else None
        for phrases in (1, 3):
            if time.perf_counter() > options.deadline:
                print(f"the time is up before {states} states, {phrases} phrases", flush=True)
                return
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

                def call_times(processors: dict[str, Any]) -> dict[str, list[float]]:
                    """Return the duration of each processor's call for each token, without the first two.

                    They take turns, so that a machine that is slow for a while is so for all of them.
                    """
                    times: dict[str, list[float]] = {name: [] for name in processors}
                    for step in range(options.calls):
                        given = torch.cat([ids, texts[:, :step]], 1)
                        for name, processor in processors.items():
                            with torch.no_grad():
                                call = lambda: results.__setitem__(name, processor(given, scores))  # noqa: E731
                                times[name].append(seconds(call, device))
                    return {name: spent[2:] for name, spent in times.items()}

                begin = time.perf_counter()
                while time.perf_counter() < begin + 0.3:  # compiles, and wakes a GPU that was idle
                    call_times({name: make() for name, make in makers.items()})
                made: dict[str, Any] = {}
                setups = {
                    name: seconds(lambda: made.__setitem__(name, make()), device) for name, make in makers.items()
                }
                medians = {name: sorted(spent)[len(spent) // 2] for name, spent in call_times(made).items()}
                for name, median in medians.items():
                    metrics = {"ms_per_call": 1e3 * median, "setup_ms": 1e3 * setups[name]}
                    if name != "steered":
                        metrics["times_steered"] = median / medians["steered"]
                        ours, other = results["steered"].exp(), results[name].exp()
                        metrics["largest_difference"] = float((ours - other).abs().max())
                    recorder.add(
                        f"{name}, one call, {states} states, {phrases} phrase(s), {count} row(s)",
                        metrics,
                        states=states,
                        phrases=phrases,
                        rows=count,
                        length=length,
                    )


def ending_with(suffix: list[int], length: int) -> Automaton:
    """Return the automaton of sequences of `length` tokens that end with `suffix`."""
    own = sorted(set(suffix))
    class_of = torch.full((WORDS,), len(own))
    class_of[own] = torch.arange(len(own))
    lost, free = length + 1, length - len(suffix)
    table = torch.full((length + 2, len(own) + 1), lost)
    table[:free] = torch.arange(1, free + 1)[:, None]
    table[torch.arange(free, length), class_of[suffix]] = torch.arange(free + 1, length + 1)
    return Automaton.of_classes(table, class_of, torch.arange(length + 2) == length)


@torch.no_grad()
def measure_agreement(options: argparse.Namespace) -> None:
    """Compare p(constraint | prefix, next token) and steered probabilities with Ctrl-G's."""
    recorder, length, generator = Recorder(options), options.length, torch.Generator().manual_seed(options.seed)
    theirs = CtrlG(options.ctrl_g, options.compile)
    texts = torch.randint(10, 1000, (options.texts, length // 4), generator=generator)
    for states in options.states:
        hmm = random_model(states, options.device)
        their_model = theirs.model(hmm)
        likely = hmm.emission.dense().exp().mean(0).topk(4).indices.tolist()  # other phrases are next to impossible
        lines: dict[str, tuple[Automaton, int | None]] = {
            "keyphrases": (containing(likely[:2], WORDS) & containing(likely[2:], WORDS), END),
            "suffix": (ending_with(likely[:3], length), None),
            "number of tokens": (at_least(length // 4, WORDS) & ~at_least(length // 2, WORDS), END),
        }
        for kind, (line, end) in lines.items():
            guide = Guide(hmm, line if end is None else line.until(end), length)
            ours, other = Steering(guide, guide.begin()), theirs.processor(their_model, line, length, [1], [], end)
            scores = torch.zeros(len(texts), WORDS, device=options.device)
            found: dict[str, float] = {}

            def compare(name: str, one: Tensor, two: Tensor) -> None:
                found[name] = max(found.get(name, 0.0), float((one - two).abs().max()))

            positions = [guide.begin()] * len(texts)
            for step in range(texts.shape[1] + 1):
                ids = torch.cat([torch.ones(len(texts), 1, dtype=torch.long), texts[:, :step]], 1).to(options.device)
                compare("largest_difference_of_steered", ours(ids, scores).exp(), other(ids, scores).exp())
                prefixes = [tuple(row) for row in texts[:, :step].tolist()]
                joint, plain = other.compute_logits(prefixes, other.token_ranges * len(texts), len(texts))
                chances = guide.log_probs_accept_of(positions)
                compare("largest_difference", chances.exp(), (joint - plain).exp())
                possible = chances > -torch.inf
                compare("largest_difference_of_logs", chances[possible], (joint - plain)[possible])
                if step < texts.shape[1]:
                    positions = guide.advance_all(positions, texts[:, step].tolist())
            recorder.add(
                f"agreement with Ctrl-G, {kind}, {states} states",
                found,
                states=states,
                length=length,
                vectors=len(texts) * (texts.shape[1] + 1),
            )


def measure_large(options: argparse.Namespace) -> None:
    """Time a request with an automaton of 5,000 automaton states and 64 tokens."""
    recorder, generator, length = Recorder(options), torch.Generator().manual_seed(0), 64
    size, classes = 5000, 40
    # Mostly forward, as the automata of long expressions are: three targets for each automaton state.
    targets = (torch.arange(size)[:, None] + torch.randint(1, 200, (size, 3), generator=generator)) % size
    table = targets.gather(1, torch.randint(0, 3, (size, classes), generator=generator))
    automaton = Automaton.of_classes(
        table, torch.randint(0, classes, (WORDS,), generator=generator), torch.arange(size) % 50 == 0
    ).until(END)
    for states in options.states:
        hmm = random_model(states, options.device)

        def request(scores: Tensor) -> tuple[Guide, float]:
            """Generate the tokens that scores [1, V] prefer, and return the guide and the duration of its set-up."""
            kept = list[Guide]()
            setup = seconds(lambda: kept.append(Guide(hmm, automaton, length)), options.device)
            steering, ids = Steering(kept[0], kept[0].begin()), torch.tensor([[1]], device=options.device)
            for _ in range(length):
                ids = torch.cat([ids, steering(ids, scores).argmax(1, keepdim=True)], 1)
            return kept[0], setup

        scores = torch.randn(2, 1, WORDS, generator=generator).to(options.device)
        request(scores[0])  # compiles, with other tokens
        made = list[tuple[Guide, float]]()
        spent = seconds(lambda: made.append(request(scores[1])), options.device)
        (guide, setup), *_ = made
        rows = sum(len(each.log_probs) for each in guide._tables)
        metrics = {"setup_s": setup, "request_s": spent, "ms_per_token": 1e3 * (spent - setup) / length}
        metrics["table_gb"] = rows * states * 4e-9
        recorder.add("steered, 5,000 automaton states", metrics, states=states, length=length)


class Writer:
    """A language model that generates lines."""

    def __init__(self, options: argparse.Namespace) -> None:
        import transformers

        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(options.model, dtype=torch.float32).to(options.device).eval()
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
        return [self.cut(row) for row in kept[0][:, ids.shape[1] :].tolist()], spent

    def draw(
        self, prompt: str, guide: Guide, position: Position, particles: int, rows: int, seed: int
    ) -> tuple[list[list[int]], float]:
        """Return texts drawn from particles by their weights, and the duration."""
        ids, kept = torch.tensor([self.ids(prompt)], device=self.device), list[Particles]()
        spent = seconds(
            lambda: kept.append(
                hmmlm.sample_particles(self.model, ids, guide, position, num_particles=particles, seed=seed)
            ),
            self.device,
        )
        return [self.cut(kept[0].draw(seed * rows + row)) for row in range(rows)], spent

    def cut(self, row: list[int]) -> list[int]:
        """Return the row up to and including its end."""
        return row[: row.index(self.end) + 1] if self.end in row else row

    @torch.no_grad()
    def log_prob(self, prompt: str, rows: list[list[int]]) -> float:
        """Return the log-probability of continuations under the model, summed."""
        start, total = self.ids(prompt), 0.0
        for first in range(0, len(rows), 64):
            part = rows[first : first + 64]
            new = padded(part, -1).to(self.device)
            ids = torch.cat([torch.tensor([start], device=self.device).expand(len(part), -1), new.clamp_min(0)], 1)
            log_probs = self.model(ids[:, :-1]).logits[:, len(start) - 1 :].log_softmax(-1)
            total += float((log_probs.gather(2, new.clamp_min(0)[..., None])[..., 0] * (new >= 0)).double().sum())
        return total


def padded(rows: list[list[int]], value: int) -> Tensor:
    """Return rows of tokens as one tensor [B, T], `value` after the end of each."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def states_along(automaton: Automaton, start: int, tokens: Tensor) -> Tensor:
    """Return the automaton states [B, T] after tokens [B, T], which it starts to read in `start`; −1 is not read."""
    state, states = torch.full((len(tokens),), start), []
    for column in tokens.t():
        following = automaton.by_class[state, automaton.class_of[column.clamp_min(0)]].long()
        state = torch.where(column >= 0, following, state)
        states.append(state)
    return torch.stack(states, 1)


def accepted(guide: Guide, position: Position, tokens: Tensor) -> Tensor:
    """Return which rows of tokens [B, T] the guide accepts [B]."""
    return guide.automaton.accepting[states_along(guide.automaton, position.automaton, tokens)[:, -1]]


def draw_pool(writer: Writer, options: argparse.Namespace) -> tuple[list[list[int]], float]:
    """Return texts without a constraint, and the duration per token."""
    rows: list[list[int]] = []
    spent = 0.0
    while len(rows) < options.pool and time.perf_counter() < options.deadline:
        more, duration = writer.write(options.prompt, options.length, min(1000, options.pool - len(rows)))
        rows, spent = rows + more, spent + duration
    return rows, spent / max(1, sum(map(len, rows)))


def draw_constraints(writer: Writer, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kinds and constraints, from texts that the model generates."""
    generator, length = random.Random(options.seed), options.length
    texts: list[str] = []
    while len(texts) < options.constraints:
        rows, _ = writer.write(options.prompt, length, 32)
        decoded = [writer.lm.tokenizer.decode([t for t in row if t != writer.end]) for row in rows]
        texts += [" ".join(text.split()) for text in decoded if len(set(re.findall(r"\b[a-z]{3,}\b", text))) >= 4]
    for number, text in enumerate(texts[: options.constraints]):
        words, kind = sorted(set(re.findall(r"\b[a-z]{3,}\b", text))), KINDS[number % len(KINDS)]
        if kind == "three words":
            yield kind, {"must": generator.sample(words, 3)}
        elif kind == "regex":
            one, two = generator.sample(words, 2)
            yield kind, {"regex": rf"[^.]* {one}[a-z]*[^.]*\. [A-Z][a-z]+ .*{two}.*\."}
        elif kind == "infilling":
            yield kind, {"suffix": " ".join(text.split()[-4:])}
        else:
            count = len(text.split())
            yield kind, {"words": (max(1, count - 1), count + 1)}


@dataclass
class Total:
    """Sums over the constraints of a kind, for one way of generating."""

    constraints: int = 0
    texts: int = 0
    satisfied: int = 0
    tokens: int = 0
    log_prob: float = 0.0
    spent: float = 0.0
    setup: float = 0.0
    feasible: int = 0  # constraints that exact samples are known for, and the sums over them
    feasible_tokens: int = 0
    feasible_log_prob: float = 0.0

    def metrics(self, plain_ms: float) -> dict[str, float]:
        per_token = 1e3 * self.spent / max(1, self.tokens)
        result = {
            "satisfied": self.satisfied / max(1, self.texts),
            "log_prob_per_token": self.log_prob / max(1, self.tokens),
            "ms_per_token": per_token,
            "times_unconstrained": per_token / plain_ms,
            "times_with_setup": 1e3 * (self.spent + self.setup) / max(1, self.tokens) / plain_ms,
            "setup_ms": 1e3 * self.setup / max(1, self.constraints),
            "constraints": self.constraints,
            "feasible": self.feasible,
        }
        if self.feasible:
            result["feasible_log_prob_per_token"] = self.feasible_log_prob / max(1, self.feasible_tokens)
        return result


def measure_texts(options: argparse.Namespace) -> None:
    """Generate under constraints: steered, masked, by Ctrl-G and by rejection."""
    writer, recorder = Writer(options), Recorder(options)
    torch.manual_seed(options.seed)
    theirs = CtrlG(options.ctrl_g, options.compile) if options.ctrl_g else None
    their_model = theirs.model(writer.lm.hmm.dense()) if theirs else None
    length, rows, lm, prompt = options.length, options.rows, writer.lm, options.prompt
    writer.write(prompt, length, rows)  # warms up
    free = [writer.write(prompt, length, rows) for _ in range(4)]
    tokens = sum(len(row) for texts, _ in free for row in texts)
    plain_ms = 1e3 * sum(spent for _, spent in free) / tokens
    pool, pool_seconds = draw_pool(writer, options)
    pool_tokens = padded(pool, -1)
    sample = pool[:512]
    log_prob = writer.log_prob(prompt, sample) / sum(map(len, sample))
    settings = {"rows": rows, "new_tokens": length, "states": lm.hmm.num_states}
    recorder.add("unconstrained", {"log_prob_per_token": log_prob, "ms_per_token": plain_ms}, **settings)
    totals: dict[tuple[str, str], Total] = {}

    def total(way: str, kind: str) -> list[Total]:
        return [totals.setdefault((way, each), Total()) for each in (kind, "all")]

    def record() -> None:
        for (way, kind), each in totals.items():
            recorder.add(f"{way}, {kind}", each.metrics(plain_ms), **settings)

    particles = f"steered, {options.particles[0]} particles"
    given = list(draw_constraints(writer, options))
    for number, (kind, constraint) in enumerate(given[: len(KINDS)] + given, -len(KINDS)):
        if number == 0:
            totals.clear()  # the first ones of each kind have compiled kernels
        if time.perf_counter() > options.deadline:
            print(f"the time is up after {number} constraints", flush=True)
            break
        kept: list[tuple[Guide, Position]] = []
        with contextlib.suppress(hmmlm.InputError):  # a text that cannot be repeated within the length
            spent_guide = seconds(
                lambda: kept.append(lm.guide(prompt=prompt, max_new_tokens=length, require_eos=False, **constraint)),
                options.device,
            )
        if not kept:
            continue
        guide, position = kept[0]
        line = guide.automaton.starting_at(position.automaton)
        exact = [pool[row] for row in accepted(guide, position, pool_tokens).nonzero()[:, 0].tolist()]
        ways: dict[str, Callable[[], Any]] = {
            "steered": lambda: Steering(guide, position),
            "masked": lambda: Steering(guide, position, weight=0.0),
        }
        if theirs and len(line.edges.source) <= options.most_edges:
            ways["Ctrl-G"] = lambda: theirs.processor(
                their_model, line, length, writer.ids(prompt), lm.tokenizer.encode(prompt)
            )
        for way in (*ways, particles):
            made: list[Any] = []
            setup = spent_guide if way != "Ctrl-G" else 0.0
            if way == particles:
                texts, spent = writer.draw(prompt, guide, position, options.particles[0], rows, number + len(KINDS))
            else:
                setup += seconds(lambda: made.append(ways[way]()), options.device)
                texts, spent = writer.write(prompt, length, rows, made[0])
            good = int(accepted(guide, position, padded(texts, -1)).sum())
            count, log_prob = sum(map(len, texts)), writer.log_prob(prompt, texts)
            for each in total(way, kind):
                each.constraints, each.texts, each.satisfied = (
                    each.constraints + 1,
                    each.texts + rows,
                    each.satisfied + good,
                )
                each.tokens, each.log_prob = each.tokens + count, each.log_prob + log_prob
                each.spent, each.setup = each.spent + spent, each.setup + setup
                if exact:
                    each.feasible, each.feasible_tokens = each.feasible + 1, each.feasible_tokens + count
                    each.feasible_log_prob += log_prob
        if exact:  # weighted as the texts of the other ways are: as many for each constraint
            chosen = [exact[place % len(exact)] for place in range(rows)]
            count, log_prob = sum(map(len, chosen)), writer.log_prob(prompt, chosen)
            for each in total("rejection", kind):
                each.constraints, each.texts, each.satisfied = (
                    each.constraints + 1,
                    each.texts + len(pool),
                    each.satisfied + len(exact),
                )
                each.tokens, each.log_prob = each.tokens + count, each.log_prob + log_prob
                # The time of drawing texts until `rows` of them are accepted.
                each.spent += pool_seconds * sum(map(len, pool)) / len(exact) * rows
                each.feasible, each.feasible_tokens = each.feasible + 1, each.feasible_tokens + count
                each.feasible_log_prob += log_prob
        if number >= 0 and number % 20 == 19:
            print(f"{number + 1} constraints", flush=True)
            record()
    record()


def measure_positions(options: argparse.Namespace) -> None:
    """Count the tokens before a word that must occur: exact draws, steered ones and particles."""
    writer, recorder = Writer(options), Recorder(options)
    torch.manual_seed(options.seed)
    pool = padded(draw_pool(writer, options)[0], -1)
    ids = torch.tensor([writer.ids(options.prompt)], device=options.device)
    found: dict[str, list[float]] = {}
    for word in options.words:
        if time.perf_counter() > options.deadline:
            break
        guide, position = writer.lm.guide(
            must=[word], max_new_tokens=options.length, prompt=options.prompt, require_eos=False
        )

        def mean_place(tokens: Tensor, weights: Tensor | None = None) -> float:
            """Return the mean number of tokens before the word, over the rows that have it."""
            open_ = ~guide.automaton.accepting[states_along(guide.automaton, position.automaton, tokens)]
            # The word is complete after the last token at which the line was not accepted yet.
            places = torch.where(open_, torch.arange(open_.shape[1]) + 1, 0).amax(1)
            weights = torch.ones(len(tokens)) if weights is None else weights
            weights = weights * ~open_[:, -1]
            return float((weights * places).sum() / weights.sum())

        having = float(
            guide.automaton.accepting[states_along(guide.automaton, position.automaton, pool)[:, -1]].float().mean()
        )
        if not having:
            print(f"none of {len(pool)} texts has {word!r}", flush=True)
            continue
        steered, _ = writer.write(options.prompt, options.length, options.samples, Steering(guide, position))
        places = {"rejection": mean_place(pool), "steered": mean_place(padded(steered, -1))}
        for particles in options.particles:
            runs = [
                hmmlm.sample_particles(writer.model, ids, guide, position, num_particles=particles, seed=seed)
                for seed in range(max(1, options.samples // particles))
            ]
            each = [
                mean_place(padded([writer.cut(row) for row in run.tokens.tolist()], -1), run.log_weights.exp().cpu())
                for run in runs
            ]
            places[f"steered, {particles} particles"] = sum(each) / len(each)
        print(
            f"{word:10} in {having:.1%} of texts", {name: round(value, 1) for name, value in places.items()}, flush=True
        )
        for name, value in places.items():
            found.setdefault(name, []).append(value)
    for name, values in found.items():
        metrics = {"tokens_before_the_word": sum(values) / len(values)}
        if name != "rejection":
            metrics["times_exact"] = sum(values) / sum(found["rejection"][: len(values)])
        recorder.add(
            f"{name}, position of a word",
            metrics,
            words=" ".join(options.words),
            new_tokens=options.length,
            states=writer.lm.hmm.num_states,
        )


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
    recorder.add("unconstrained, one word", {"ms_per_token": plain}, rows=options.rows, states=guide.hmm.num_states)
    metrics = {"ms_per_token": steered, "times_unconstrained": steered / plain}
    recorder.add("steered, one word", metrics, rows=options.rows, states=guide.hmm.num_states)


def measure_regexes(options: argparse.Namespace) -> None:
    """Time the automata of regular expressions that a model has not read before."""
    recorder, lm = Recorder(options), hmmlm.load(options.run)
    assert isinstance(lm, LanguageModel)
    once = seconds(lambda: lm.automaton(regex="x"), options.device)  # also spells the tokens
    lm.automaton(regex="[a-z]+ (x|y).*")  # warms up
    for pattern in REGEXES:
        spent = seconds(lambda: lm.automaton(regex=pattern), options.device)
        metrics = {"compile_ms": 1e3 * spent, "first_ms": 1e3 * once}
        recorder.add(f"regular expression {pattern}", metrics, tokens=lm.hmm.vocab_size)


def sampling_speed(options: argparse.Namespace) -> float:
    """Return how many tokens of the model are sampled per second."""
    from hmmlm.device import pick_device
    from hmmlm.teachers.sampling import open_sampler

    sampler = open_sampler(options.model, device=pick_device(options.device))
    rows, length = (1024, options.text_length) if options.device == "cuda" else (8, min(16, options.text_length))
    prompts = [sampler.encode_prompt("")] * rows
    kept: list[int] = []

    def sample(steps: int) -> Callable[[], None]:
        return lambda: kept.append(sum(len(text.tokens) for text in sampler.sample(prompts, steps, 0, lambda _: None)))

    sample(2)()  # warms up
    spent = seconds(sample(length), options.device)
    return kept[-1] / spent


def distil(options: argparse.Namespace) -> None:
    """Distil the model into a new run; at the deadline, what is trained by then is the result."""
    from hmmlm.config.distill import DistillConfig
    from hmmlm.runs.progress import terminal_progress
    from hmmlm.training.distill import distill

    start = time.perf_counter()
    speed = sampling_speed(options)
    tokens = min(options.tokens, int(0.4 * speed * (options.deadline - start)))  # the rest is for training
    print(f"the model is sampled at {speed:,.0f} tokens/s: {tokens:,} tokens", flush=True)
    given = {"tokens": tokens, "num_states": options.hmm_states, "epochs": options.epochs}
    given["length"] = options.text_length
    config = DistillConfig(model=options.model, device=options.device, seed=options.seed, **given)
    stop = threading.Timer(max(1.0, options.deadline - time.perf_counter()), os.kill, (os.getpid(), signal.SIGINT))
    stop.daemon = True
    stop.start()
    result = distill(config, options.run, terminal_progress())
    stop.cancel()
    metrics = {"seconds": time.perf_counter() - start, "epochs": result.epochs, "perplexity": result.best_perplexity}
    Recorder(options).add("distilled", metrics, states=options.hmm_states, tokens=tokens)


PARTS: dict[str, tuple[float, Callable[[argparse.Namespace], None], dict[str, Any]]] = {
    "agreement": (3, measure_agreement, {"states": [64, 1024], "texts": 8}),
    "calls": (6, measure_calls, {}),
    "large": (2, measure_large, {"states": [1024]}),
    "distil": (25, distil, {}),
    "texts": (55, measure_texts, {}),
    "overhead": (3, measure_overhead, {"rows": 1}),
    "regexes": (1, measure_regexes, {}),
    "positions": (6, measure_positions, {}),
}
"""The parts of `all`: share of the time, function and options; those that are needed most come first."""


def measure_all(options: argparse.Namespace) -> None:
    """Measure every part until its share of the time is spent; what one leaves is for the others."""
    begin = time.perf_counter()
    chosen = [name for name in PARTS if name in options.parts]
    for place, name in enumerate(chosen):
        share, measure, changes = PARTS[name]
        spent = time.perf_counter() - begin
        left = options.budget - spent
        if left <= 0:
            print(f"--- {name}: left out, {spent:.0f} s are spent", flush=True)
            continue
        options.deadline = begin + spent + left * share / sum(PARTS[each][0] for each in chosen[place:])
        print(f"--- {name}, from {spent:.0f} s on", flush=True)
        try:
            measure(argparse.Namespace(**{**vars(options), **changes, "part": name}))
        except Exception as error:  # the other parts still count
            if name == "distil":
                raise
            print(f"--- {name} failed: {type(error).__name__}: {error}", flush=True)
    print(f"--- finished after {time.perf_counter() - begin:.0f} s", flush=True)


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
    common.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)
    texts = argparse.ArgumentParser(add_help=False)
    texts.add_argument("model")
    texts.add_argument("run", type=Path)
    texts.add_argument("--prompt", default="Once upon a time")
    texts.add_argument("--rows", type=int, default=4, help="texts of a constraint")
    texts.add_argument("--pool", type=int, default=2000, help="texts of rejection sampling")
    calls = argparse.ArgumentParser(add_help=False)
    calls.add_argument("--states", type=int, nargs="+", default=[64, 256, 1024, 4096])
    calls.add_argument("--batches", type=int, nargs="+", default=[16, 1])
    calls.add_argument("--calls", type=int, default=10)
    constrained = argparse.ArgumentParser(add_help=False)
    constrained.add_argument("--constraints", type=int, default=200)
    constrained.add_argument("--most-edges", type=int, default=2000, help="of an automaton that Ctrl-G is given")
    positions = argparse.ArgumentParser(add_help=False)
    positions.add_argument("--words", nargs="+", default=["dog", "tree", "mom", "garden", "happy"])
    positions.add_argument("--samples", type=int, default=64, help="steered texts of a word")
    weighted = argparse.ArgumentParser(add_help=False)
    weighted.add_argument("--particles", type=int, nargs="+", default=[16], help="of texts: the first")
    overhead = argparse.ArgumentParser(add_help=False)
    overhead.add_argument("--repeats", type=int, default=5)
    distilled = argparse.ArgumentParser(add_help=False)
    distilled.add_argument("--budget", type=float, default=500.0, help="seconds")
    distilled.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="without distil, RUN exists")
    distilled.add_argument("--tokens", type=int, default=8_000_000, help="sampled tokens of the distillation")
    distilled.add_argument("--text-length", type=int, default=255, help="tokens of a sampled text after its first")
    distilled.add_argument("--hmm-states", type=int, default=4096)
    distilled.add_argument("--epochs", type=int, default=4)
    agreement = parts.add_parser("agreement", parents=[common])
    agreement.add_argument("--states", type=int, nargs="+", default=[64, 1024])
    agreement.add_argument("--texts", type=int, default=8)
    parts.add_parser("calls", parents=[common, calls])
    parts.add_parser("large", parents=[common]).add_argument("--states", type=int, nargs="+", default=[256, 1024])
    parts.add_parser("texts", parents=[common, texts, constrained, weighted])
    parts.add_parser("positions", parents=[common, texts, positions, weighted])
    parts.add_parser("overhead", parents=[common, texts, overhead])
    parts.add_parser("regexes", parents=[common, texts])
    parts.add_parser("all", parents=[common, texts, calls, constrained, positions, weighted, overhead, distilled])
    options = parser.parse_args()
    measure = measure_all if options.part == "all" else PARTS[options.part][1]
    measure(options)


if __name__ == "__main__":
    main()
