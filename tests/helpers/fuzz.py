"""Random models of every pair of kinds, and their queries against the enumeration of all paths in extended precision.

`make fuzz SEED=1 COUNT=2000` runs a campaign; tests/test_fuzz.py runs a short one, tests/gpu one on a GPU.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from helpers.extended import LONG, NEG_INF, Array, Paths, Truth, accepted, infill_blanks, log_sum, widen
from helpers.oracle import with_gradients
from hmmlm.constrain.automaton import Automaton
from hmmlm.constrain.guide import Guide
from hmmlm.emissions import Blocked, Categorical, Emission, UnionEmission
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Counts
from hmmlm.hmm.hmm import side_by_side
from hmmlm.ops import pieces
from hmmlm.ops.common import Carry, Impl, Scan, logsumexp
from hmmlm.scan.composition import parameters_of
from hmmlm.scan.generic_scan import generic_scan
from hmmlm.scan.likelihood import joint_scan
from hmmlm.transitions import (
    BlockDiagonal,
    Dense,
    Factored,
    LowRank,
    Monarch,
    Transition,
)

MOST_PATHS = 1300
BASE = {torch.float32: 3e-5, torch.float64: 1e-10}  # error allowed to any answer
SAMPLES = 2000
BLOCKS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (2, 3)]  # number, and states of each


class Batch(NamedTuple):
    tokens: Tensor  # [B, T]
    lengths: Tensor | None
    carry: Tensor | None  # [B, Z]
    restart: Tensor | None  # [B, T]

    def row(self, b: int) -> list[int]:
        """Return the tokens of a sequence."""
        size = self.tokens.shape[1] if self.lengths is None else int(self.lengths[b])
        return self.tokens[b, :size].tolist()

    def rows(self, index: list[int]) -> "Batch":
        return Batch(*(None if value is None else value[index] for value in self))


class Fuzz:
    """One random model with its batch; `run` counts right answers and lists wrong ones."""

    def __init__(self, seed: int, device: str = "cpu", impl: Impl | None = None) -> None:
        self.seed, self.device, self.rng = seed, torch.device(device), np.random.default_rng(seed)
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.dtype = torch.float32 if self.rng.random() < 0.5 else torch.float64
        self.regimes = self.rng.random() < 0.15
        drawn: Impl = str(self.rng.choice(["auto", "naive", "scaled"]))  # type: ignore[assignment]
        self.two_matrices = impl is not None
        self.hmm = self._model().to(self.device)
        self.hmm.impl = self.impl = impl or drawn
        self.conditions = self._conditions()
        self.truth = Truth.of(self.hmm)
        self.batch = self._batch()
        steps = self.batch.tokens.shape[1] + 1
        self.tolerance = BASE[self.dtype] + 8 * torch.finfo(self.dtype).eps * (1 + self.truth.magnitude) * steps

    # --- random models and batches ---

    def _log_rows(self, shape: tuple[int, ...], zeros: bool = True) -> Array:
        """Return rows of log-probabilities: mild, peaked, or down to 1e-300, some of them exact zeros."""
        rng = self.rng
        style = rng.choice(["mild", "peaked", "extreme", "one"])
        if self.regimes and len(shape) == 2:  # each state has its own word, and states hardly change
            values = -rng.uniform(0.4, 1.0, size=shape) * rng.choice([45.0, 200.0])
            np.fill_diagonal(values, 0.0)
            return values.astype(LONG) - log_sum(values.astype(LONG), -1)[..., None]
        if style in ("mild", "peaked"):
            values = rng.normal(size=shape) * (1.0 if style == "mild" else 30.0)
        else:
            values = -rng.uniform(0, rng.choice([60.0, 200.0, 690.0]), size=shape)
            if style == "one":
                np.put_along_axis(values, rng.integers(shape[-1], size=(*shape[:-1], 1)), 0.0, -1)
        if zeros and rng.random() < 0.6:
            lost = rng.random(shape) < rng.choice([0.2, 0.6])
            np.put_along_axis(lost, rng.integers(shape[-1], size=(*shape[:-1], 1)), False, -1)
            values = np.where(lost, -np.inf, values)
        values = values.astype(LONG)
        return values - log_sum(values, -1)[..., None]

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values.astype(np.float64)).to(self.dtype)

    def _model(self) -> HMM:
        return self._pair()

    def _pair(self, words: int | None = None) -> HMM:
        """Return a model of a random kind of transition and emission, of any number of words unless it is given."""
        make_transition, make_emission = KINDS[0 if self.two_matrices else self.rng.integers(len(KINDS))]
        emission = make_emission(self, words)
        states = emission.num_states
        return HMM(self._tensor(self._log_rows((states,))), make_transition(self, states), emission)

    def _dense(self, states: int) -> Dense:
        return Dense(self._tensor(self._log_rows((states, states))))

    def _factored(self, states: int) -> Factored:
        rng = self.rng
        if rng.random() < 0.5:  # any transition matrix
            u, w = self._log_rows((states, states), zeros=False).astype(np.float64), np.eye(states)
        else:
            hidden = int(rng.integers(1, 4))
            scale = rng.choice([1.0, 5.0, 15.0])
            u, w = scale * rng.normal(size=(states, hidden)), scale * rng.normal(size=(states, hidden))
        u, w = (self._tensor(x) for x in (u, w))
        return Factored(u, w, self._tensor(log_sum(widen(u) @ widen(w).T, 1)))

    def _low_rank(self, states: int) -> LowRank:
        rank = int(self.rng.integers(1, 4))
        return LowRank(self._tensor(self._log_rows((states, rank))), self._tensor(self._log_rows((rank, states))))

    def _monarch(self, states: int) -> Monarch:
        groups = int(self.rng.choice([n for n in range(1, states + 1) if states % n == 0]))
        width = states // groups
        left, right = self._log_rows((groups, width, width)), self._log_rows((width, groups, groups))
        return Monarch(self._tensor(left), self._tensor(right))

    def _categorical(self, words: int | None) -> Categorical:
        states, some = (int(self.rng.choice([1, 2, 3, 4])) for _ in range(2))
        return Categorical(self._tensor(self._log_rows((states, some if words is None else words))))

    def _blocked(self, words: int | None) -> Blocked:
        rng = self.rng
        # Each block has a word.
        blocks, width = BLOCKS[rng.choice([i for i, (m, _) in enumerate(BLOCKS) if words is None or m <= words])]
        words = int(blocks + rng.integers(3)) if words is None else words
        block_of_word = rng.permutation(np.concatenate([np.arange(blocks), rng.integers(blocks, size=words - blocks)]))
        scores = np.full((words, width), NEG_INF)
        for block in range(blocks):
            own = np.flatnonzero(block_of_word == block)
            scores[own] = self._log_rows((width, len(own))).T
        return Blocked(self._tensor(scores), torch.from_numpy(block_of_word), blocks)

    def _batch(self) -> Batch:
        rng, hmm = self.rng, self.hmm
        longest = 8 if hmm.num_states == 1 else min(8, int(np.log(MOST_PATHS) / np.log(hmm.num_states)))
        size, steps = int(rng.integers(1, 4)), longest if self.regimes else int(rng.integers(1, longest + 1))
        tokens = hmm.sample(size, steps, self._generator())[0].cpu()
        if rng.random() < 0.6:  # other tokens are surprising, or impossible
            swapped = torch.from_numpy(rng.random((size, steps)) < rng.choice([0.2, 1.0]))
            tokens = torch.where(swapped, torch.from_numpy(rng.integers(hmm.vocab_size, size=(size, steps))), tokens)
        if self.regimes or rng.random() < 0.1:
            tokens = tokens.sort(1, descending=bool(rng.random() < 0.5))[0]
        if rng.random() < 0.4:
            tokens = tokens.masked_fill(torch.from_numpy(rng.random((size, steps)) < 0.4), -1)
        lengths = torch.from_numpy(rng.integers(1, steps + 1, size=size)) if rng.random() < 0.5 else None
        carry = restart = None
        if rng.random() < 0.5:
            carry = torch.from_numpy(self._log_rows((size, hmm.num_states)).astype(np.float64))
        if rng.random() < 0.5:
            restart = torch.from_numpy(rng.random((size, steps)) < 0.3)
        return Batch(*(None if x is None else x.to(self.device) for x in (tokens, lengths, carry, restart)))

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    # --- comparison ---

    def check(self, name: str, good: bool, detail: str = "") -> None:
        """Count one answer."""
        if good:
            self.right[name] += 1
        else:
            self.wrong.append(f"seed {self.seed}: {name} of {self.hmm}, {self.dtype}, impl {self.impl}: {detail}")

    def agree(self, name: str, got: Tensor, want: Array, scale: float = 1.0) -> None:
        """Count one answer: the same infinities, and otherwise errors within the tolerance times `scale`."""
        found, want = widen(got), np.asarray(want, dtype=LONG)
        good = found.shape == want.shape
        if good:
            infinite = np.isinf(want)
            error = np.abs(np.where(infinite, 0, found) - np.where(infinite, 0, want))
            good = bool((found[infinite] == want[infinite]).all()) and bool((error <= scale * self.tolerance).all())
        self.check(name, good, f"{found.astype(float).tolist()} should be {want.astype(float).tolist()}")

    def run(self) -> "Fuzz":
        with small_pieces(self.rng.random() < 0.3):
            self._likelihoods()
            self._scans()
            self._windows()
            self._queries()
            self._sequential()
            self._guide()
            if self.rng.random() < 0.1:
                self._samples()
            self._labels()
        return self

    # --- likelihoods and gradients ---

    def _paths(self, batch: Batch, carry: bool = False, restart: bool = False) -> list[Paths]:
        return [
            Paths(
                self.truth,
                batch.row(b),
                widen(batch.carry[b]) if carry and batch.carry is not None else None,
                batch.restart[b].tolist() if restart and batch.restart is not None else None,
            )
            for b in range(len(batch.tokens))
        ]

    def _leaves(self) -> HMM:
        """Return the model with parameters that require gradients."""
        return with_gradients(self.hmm)

    def _gradients(self, name: str, model: HMM, log_likelihood: Tensor, paths: list[Paths]) -> None:
        """Compare the gradient of a weighted sum of log-likelihoods with the expected counts."""
        weight = torch.from_numpy(self.rng.normal(size=len(paths))).to(log_likelihood)
        leaves = parameters_of(model)
        inputs = list(leaves.values())
        gradients = torch.autograd.grad(log_likelihood, inputs, weight, allow_unused=True, materialize_grads=True)
        total = [np.zeros_like(p) for p in self.truth[:3]]
        for w, own in zip(widen(weight), paths, strict=True):
            total = [a + w * b for a, b in zip(total, own.counts(), strict=True)]
        scale = float(np.abs(widen(weight)).sum()) * max(1, self.batch.tokens.shape[1])
        want = self._wanted(total)
        for key, gradient in zip(leaves, gradients, strict=True):
            self.agree(f"{name}, gradient of {key}", gradient, want[key], scale * self.conditions[key])

    def _wanted(self, counts: Sequence[Array]) -> dict[str, Array]:
        """Return the gradient of each tensor by the expected counts: those of entries, by the chain rule."""
        start, *inner = counts
        want = {"log_start": start}
        for part, own in zip((self.hmm.transition, self.hmm.emission), inner, strict=True):
            leaves, dense = exact_leaves(part)
            given = torch.from_numpy(own.astype(np.float64))
            gradients = torch.autograd.grad(dense, list(leaves.values()), given)
            want |= {f"{part.role}.{name}": widen(value) for name, value in zip(leaves, gradients, strict=True)}
        return want

    def _conditions(self) -> dict[str, float]:
        """Return by how much more than the counts of entries the gradient of each tensor may err."""
        found = {"log_start": 1.0}
        for part in (self.hmm.transition, self.hmm.emission):
            leaves, dense = exact_leaves(part)
            every = torch.eye(dense.numel(), dtype=dense.dtype).view(-1, *dense.shape)
            slopes = torch.autograd.grad(dense, list(leaves.values()), every, is_grads_batched=True)
            found |= {
                f"{part.role}.{name}": 1 + float(own.abs().max()) for name, own in zip(leaves, slopes, strict=True)
            }
        return found

    def _likelihoods(self) -> None:
        batch, paths = self.batch, self._paths(self.batch)
        model = self._leaves()
        log_likelihood = model.log_likelihood(batch.tokens, batch.lengths)
        for b, own in enumerate(paths):
            self.agree("log_likelihood", log_likelihood[b], own.log_likelihood())
        self._gradients("log_likelihood", model, log_likelihood, paths)
        counts = self.hmm.expected_counts(batch.tokens, batch.lengths)
        total = [sum(column) for column in zip(*(own.counts() for own in paths), strict=True)]
        self._counts(counts, total, len(paths) * batch.tokens.shape[1])
        total_log_likelihood = sum(own.log_likelihood() for own in paths)
        self.agree("expected_counts, log_likelihood", counts.log_likelihood, total_log_likelihood, scale=len(paths))

    def _counts(self, got: Counts, total: Sequence[Array], scale: float) -> None:
        """Compare expected counts: matrices, or those of the tensors of a kind, or of each model of a union."""
        hmm, want = self.hmm, self._wanted(total)
        self.agree("expected_counts, start", got.start, total[0], scale)
        for part, own, found in zip((hmm.transition, hmm.emission), total[1:], got[1:3], strict=True):
            name = f"expected_counts, {part.role}"
            if isinstance(part, Dense | Factored | Categorical) or is_matrix(part):
                self.agree(f"{name} matrix", found, own, scale)
                continue
            parts = part.parts if isinstance(part, BlockDiagonal | UnionEmission) else (part,)
            if len(parts) > 1 or parts[0] is not part:
                self.check(f"{name} of each model", isinstance(found, tuple), f"{type(found).__name__}, not a tuple")
            end = 0
            for i, (each, values) in enumerate(
                zip(parts, found if isinstance(found, tuple) else (found,), strict=False)
            ):
                first, end = end, end + each.num_states
                prefix = f"{part.role}." if each is part else f"{part.role}.{i}."
                if isinstance(each, Dense | Factored):
                    self.agree(f"{name} matrix", values, own[first:end, first:end], scale)
                    continue
                for key, value in (values if isinstance(values, dict) else {"log_probs": values}).items():
                    self.agree(f"{name}.{key}", value, want[prefix + key], scale)

    def _scans(self) -> None:
        """Scans continue from a carry, restart, and end anywhere."""
        batch, hmm = self.batch, self.hmm
        carry, paths = None if batch.carry is None else Carry(batch.carry), self._paths(batch, True, True)
        model = self._leaves()
        self._scan("scan", model, model.scan(batch.tokens, batch.lengths, carry, batch.restart), paths)
        model = self._leaves()
        given = batch.tokens, batch.lengths, carry, batch.restart
        self._scan("generic scan", model, generic_scan(model, *given, exact_carry=True), paths)
        with torch.no_grad():
            exact = hmm.scan(batch.tokens, batch.lengths, carry, batch.restart, exact_carry=True)
        self._carries("exact scan", exact, paths)
        if isinstance(hmm.emission, Blocked):
            self._entered_scan()

    def _entered_scan(self) -> None:
        """What a scan continues from may be given over the states of the first word, which is not missing."""
        random = torch.from_numpy(self.rng.integers(self.hmm.vocab_size, size=tuple(self.batch.tokens.shape)))
        tokens = torch.where(self.batch.tokens < 0, random.to(self.device), self.batch.tokens)
        batch, model, entry = self.batch._replace(tokens=tokens), self._leaves(), None
        assert isinstance(model.emission, Blocked)
        if batch.carry is not None:
            moved, blocks = model.transition.dense(), model.emission.num_blocks
            every = logsumexp(batch.carry[:, :, None].to(moved) + moved, 1).unflatten(1, (blocks, -1))
            entry = every[torch.arange(len(every)), model.emission.block_of_word[tokens[:, 0]]][:, None]
        found = generic_scan(model, tokens, batch.lengths, None, batch.restart, entry=entry, exact_carry=True)
        self._scan("entered scan", model, found, self._paths(batch, carry=True, restart=True))

    def _scan(self, name: str, model: HMM, found: Scan, paths: list[Paths]) -> None:
        self._carries(name, found, paths)
        self._gradients(name, model, found.log_likelihood, paths)

    def _carries(self, name: str, found: Scan, paths: list[Paths]) -> None:
        for b, own in enumerate(paths):
            total = own.log_likelihood()
            self.agree(name, found.log_likelihood[b], total)
            if total > NEG_INF:  # nothing continues from an impossible sequence
                self.agree(f"carry of {name}", found.carry.over_all(self.hmm.num_states)[b], own.log_carry(), 2)

    def _windows(self) -> None:
        """What two windows find is what one finds of both."""
        tokens, hmm = self.batch.tokens, self.hmm
        if tokens.shape[1] < 2:
            return
        size, paths = int(self.rng.integers(1, tokens.shape[1])), self._paths(self.batch._replace(lengths=None))
        first, second = tokens[:, :size], tokens[:, size:]
        before = hmm.filter(first)
        after, scored = hmm.filter(second, carry=before.carry), hmm.token_log_probs(second, carry=before.carry)
        total = before.log_likelihood.double() + after.log_likelihood.double()
        for b, own in enumerate(paths):
            self.agree("filter, two windows", total[b], own.log_likelihood(), 2)
            self.agree("filter, second window", after.probs[b], own.filtered()[size:], 2)
            if own.log_likelihood() > NEG_INF:
                self.agree("filter, last carry", after.carry.log_probs[b], own.log_carry(), 4)
            sums = before.log_likelihood[b] + scored[b].sum()
            self.agree("token_log_probs, two windows", sums, own.log_likelihood(), 2)
        begun = hmm.scan(first)
        ended = hmm.scan(second, carry=begun.carry)
        total = begun.log_likelihood.double() + ended.log_likelihood.double()
        for b, own in enumerate(paths):
            self.agree("scan, two windows", total[b], own.log_likelihood(), 2)

    # --- queries ---

    def _queries(self) -> None:
        batch, hmm = self.batch, self.hmm
        paths, carry = self._paths(batch, carry=True), None if batch.carry is None else Carry(batch.carry)
        model = self._leaves()
        filtered = model.filter(batch.tokens, batch.lengths, carry)
        self._gradients("filter", model, filtered.log_likelihood, paths)
        filtered = hmm.filter(batch.tokens, batch.lengths, carry)
        for b, own in enumerate(paths):
            size = len(own.tokens)
            self.agree("filter, log-likelihood", filtered.log_likelihood[b], own.log_likelihood())
            self.agree("filter", filtered.probs[b, :size], own.filtered())
            self.agree("filter, carry", filtered.carry.log_probs[b], own.log_carry(), 2)
            self.check("filter, beyond the length", bool((filtered.probs[b, size:] == 0).all()))
        paths = self._paths(batch)
        possible = [b for b, own in enumerate(paths) if own.impossible_at() is None]
        if len(possible) < len(paths):
            self._errors(batch, paths)
        if not possible:
            return
        batch, paths = batch.rows(possible), [paths[b] for b in possible]
        given = batch.tokens, batch.lengths
        posterior, infill, entropy, following = (
            q(*given) for q in (hmm.posterior, hmm.infill, hmm.entropy, hmm.next_token)
        )
        states, best = hmm.viterbi(*given)
        drawn = hmm.posterior_sample(*given, 2, self._generator())
        for b, own in enumerate(paths):
            size = len(own.tokens)
            self.agree("posterior", posterior[b, :size], own.posterior())
            self.agree("infill", infill[b, :size], own.infill(), 2)
            self.agree("entropy", entropy[b], own.entropy(), size)
            self.agree("next_token", following[b], own.next_token(), 2)
            self.agree("viterbi, log-probability", best[b], own.log_joint.max())
            self.agree("viterbi, path", best[b], own.log_joint_of(states[b, :size].tolist()), 2)
            for beyond, fill in ((posterior, 0), (infill, NEG_INF), (states, -1), (drawn.movedim(0, 2), -1)):
                self.check("beyond the length", bool((beyond[b, size:] == float(fill)).all()))
            for path in drawn[:, b, :size].tolist():
                self.check("posterior_sample, possible", bool(own.log_joint_of(path) > NEG_INF))

    def _errors(self, batch: Batch, paths: list[Paths]) -> None:
        """Queries of impossible sequences name the first one and its first impossible token."""
        first = next(b for b, own in enumerate(paths) if own.impossible_at() is not None)
        position = paths[first].impossible_at()
        assert position is not None
        want = rf"sequence {first} is impossible .* token {paths[first].tokens[position]} at position {position} "
        hmm = self.hmm
        for query in (hmm.posterior, hmm.infill, hmm.entropy, hmm.next_token, hmm.viterbi, hmm.posterior_sample):
            message = error_of(lambda query=query: query(batch.tokens, batch.lengths))
            self.check(f"error of {query.__name__}", bool(re.search(want, message)), f"{message!r} should be {want!r}")

    def _labels(self) -> None:
        """States that are known, or known to be among some: the paths that these labels allow."""
        batch, hmm, rng, paths = self.batch, self.hmm, self.rng, self._paths(self.batch)
        allowed = rng.random((*batch.tokens.shape, hmm.num_states)) < rng.choice([0.5, 0.9])
        known = rng.random(batch.tokens.shape) < 0.5
        states = np.where(known, rng.integers(hmm.num_states, size=known.shape), -1)
        for b, own in enumerate(paths):  # most of them agree with some path
            likely = own.paths[int(own.log_joint.argmax())]
            if rng.random() < 0.8:
                states[b, : len(likely)] = np.where(known[b, : len(likely)], likely, -1)
            np.put_along_axis(allowed[b, : len(likely)], likely[:, None], True, 1)
        by_state = (states[..., None] < 0) | (states[..., None] == np.arange(hmm.num_states))
        for name, labels, masks in (("states", states, by_state), ("sets of states", allowed, allowed)):
            given = torch.from_numpy(labels).to(self.device)
            own = [path.labelled(masks[b]) for b, path in enumerate(paths)]
            model = self._leaves()
            log_likelihood = model.log_likelihood(batch.tokens, batch.lengths, given)
            for b, path in enumerate(own):
                self.agree(f"log_likelihood given {name}", log_likelihood[b], path.log_likelihood())
            self._gradients(f"log_likelihood given {name}", model, log_likelihood, own)
            counts = hmm.expected_counts(batch.tokens, batch.lengths, given)
            total = [sum(column) for column in zip(*(path.counts() for path in own), strict=True)]
            self._counts(counts, total, len(own) * batch.tokens.shape[1])
            possible = [b for b, path in enumerate(own) if path.impossible_at() is None]
            if len(possible) < len(own):
                first = next(b for b in range(len(own)) if b not in possible)
                message = error_of(lambda given=given: hmm.posterior(batch.tokens, batch.lengths, given))
                want = f"sequence {first} is impossible .* at position {own[first].impossible_at()} "
                self.check(f"error given {name}", bool(re.search(want, message)), f"{message!r} should be {want!r}")
            if not possible:
                continue
            some = batch.rows(possible)
            posterior = hmm.posterior(some.tokens, some.lengths, given[possible])
            states_found, best = hmm.viterbi(some.tokens, some.lengths, given[possible])
            for i, b in enumerate(possible):
                size = len(own[b].tokens)
                self.agree(f"posterior given {name}", posterior[i, :size], own[b].posterior())
                self.agree(f"viterbi given {name}", best[i], own[b].log_joint.max())
                path = own[b].log_joint_of(states_found[i, :size].tolist())
                self.agree(f"viterbi given {name}, path", best[i], path, 2)

    def _sequential(self) -> None:
        """One token at a time, blanks, and joint probabilities of tokens and states."""
        hmm, rng = self.hmm, self.rng
        tokens = self.batch.row(0)
        log_state = hmm.begin()
        for t, token in enumerate(tokens):
            log_state = hmm.advance(log_state, token)
            own = Paths(self.truth, tokens[: t + 1])
            if own.impossible_at() is not None:
                self.check("advance by an impossible token", bool((log_state == -torch.inf).all()), str(log_state))
                break
            self.agree("advance", log_state, own.predicted(), 2)
            self.agree("emit", hmm.emit(log_state), own.next_token(), 2)
            some = torch.from_numpy(rng.permutation(hmm.vocab_size)[:2]).to(self.device)
            self.agree("emit of tokens", hmm.emit(log_state, some), own.next_token()[some.cpu().numpy()], 2)
        excluded = int(rng.integers(hmm.vocab_size))
        want = infill_blanks(self.truth, tokens, excluded)
        if want is None:
            message = error_of(lambda: hmm.infill_blanks([tokens], excluded))
            self.check("error of infill_blanks", "probability zero" in message, message)
        else:
            self.agree("infill_blanks", hmm.infill_blanks([tokens], excluded), want, 2)
        batch = self.batch
        states = torch.from_numpy(rng.integers(hmm.num_states, size=tuple(batch.tokens.shape))).to(self.device)
        if batch.lengths is not None:
            states = states.masked_fill(torch.arange(states.shape[1], device=self.device) >= batch.lengths[:, None], -1)
        joint = joint_scan(hmm, batch.tokens, states, batch.lengths, None, batch.restart).log_likelihood
        for b, own in enumerate(self._paths(batch, restart=True)):
            self.agree("joint_scan", joint[b], own.log_joint_of(states[b, : len(own.tokens)].tolist()))

    def _guide(self) -> None:
        """A random automaton over a few tokens."""
        rng, hmm = self.rng, self.hmm
        length = int(rng.integers(1, 4)) if hmm.num_states < 4 else int(rng.integers(1, 3))
        count = int(rng.integers(1, 4))
        table = torch.from_numpy(rng.integers(count, size=(count, hmm.vocab_size)))
        automaton = Automaton(table, torch.from_numpy(rng.random(count) < 0.5))
        prefix = [int(v) for v in hmm.sample(1, 2, self._generator())[0][0][: int(rng.integers(3))]]
        guide = Guide(hmm, automaton, length)
        position = guide.begin(prefix)
        want, plain = accepted(self.truth, automaton, prefix, length), accepted(self.truth, anything(hmm), prefix, 1)
        scale = 2.0 * (length + 2)
        self.agree("guide, joint", guide.joint(position), want, scale)
        self.agree(
            "guide, log_prob_accept",
            torch.tensor(guide.log_prob_accept(position), dtype=torch.float64),
            np.minimum(log_sum(want), 0),
            scale,
        )
        relative = np.where(plain > NEG_INF, want - np.where(plain > NEG_INF, plain, 0), NEG_INF)
        self.agree("guide, log_probs_accept", guide.log_probs_accept(position), np.minimum(relative, 0), scale)
        if log_sum(want) > NEG_INF:
            self.agree("guide, next_token", guide.next_token(position), want - log_sum(want), scale)
        else:
            message = error_of(lambda: guide.next_token(position))
            self.check("error of a guide", "no continuation" in message, message)

    def _samples(self) -> None:
        """Frequencies of samples: within six standard deviations of their probability."""
        hmm = self.hmm
        tokens, states = hmm.sample(SAMPLES, 2, self._generator())
        start, transition, emission = self.truth[:3]
        expected = np.exp(
            start[:, None, None, None] + transition[:, :, None, None]
            + emission[:, None, :, None] + emission[None, :, None, :]
        )  # fmt: skip
        self._frequencies("sample", [*states.cpu().numpy().T, *tokens.cpu().numpy().T], expected)
        own = Paths(self.truth, self.batch.row(0))
        if own.impossible_at() is None:
            drawn = hmm.posterior_sample([own.tokens], None, SAMPLES, self._generator())[:, 0]
            shape = (hmm.num_states,) * len(own.tokens)
            self._frequencies("posterior_sample", list(drawn.cpu().numpy().T), own.probabilities().reshape(shape))

    def _frequencies(self, name: str, index: Sequence[Array], expected: Array) -> None:
        found = np.zeros(expected.shape)
        np.add.at(found, tuple(index), 1)
        mean = SAMPLES * expected.astype(float)
        good = np.abs(found - mean) <= 6 * np.sqrt(mean) + 6 * (mean > 0)
        self.check(name, bool(good.all()), f"{found[~good]} times instead of {mean[~good]}")


Make = tuple[Callable[[Fuzz, int], Transition], Callable[[Fuzz, int | None], Emission]]
TRANSITIONS: dict[type[Transition], Callable[[Fuzz, int], Transition]] = {
    Dense: Fuzz._dense,
    Factored: Fuzz._factored,
    LowRank: Fuzz._low_rank,
    Monarch: Fuzz._monarch,
}
EMISSIONS: dict[type[Emission], Callable[[Fuzz, int | None], Emission]] = {
    Categorical: Fuzz._categorical,
    Blocked: Fuzz._blocked,
}
KINDS: list[Make] = list(product(TRANSITIONS.values(), EMISSIONS.values()))
"""How to draw a transition of some states and an emission of some words (None: any), of every pair of kinds."""


class UnionFuzz(Fuzz):
    """A random union of models of any kinds over the same words, some with a weight of zero."""

    def _model(self) -> HMM:
        parts = [self._pair()]
        while len(parts) < 3 and self.rng.random() < (0.9, 0.2)[len(parts) - 1]:
            parts.append(self._pair(parts[0].vocab_size))
        weights = self._tensor(self._log_rows((len(parts),)))
        log_start = torch.cat([part.log_start + weight for part, weight in zip(parts, weights, strict=True)])
        return side_by_side(log_start, parts)


def is_matrix(part: Transition | Emission) -> bool:
    """Return whether the counts of a union are one matrix: those of every model are."""
    kinds = (Dense, Factored) if isinstance(part, BlockDiagonal) else (Categorical,)
    return isinstance(part, BlockDiagonal | UnionEmission) and all(isinstance(each, kinds) for each in part.parts)


def exact_leaves(part: Transition | Emission) -> tuple[dict[str, Tensor], Tensor]:
    """Return the parameters of a transition or an emission in float64 on the CPU, and its matrix, made of them."""
    exact = part.to("cpu", torch.float64)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters_of(exact).items()}
    return leaves, exact.replace(leaves).dense()


def anything(hmm: HMM) -> Automaton:
    return Automaton(torch.zeros(1, hmm.vocab_size, dtype=torch.long), torch.ones(1, dtype=torch.bool))


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the InputError that a call raises; empty if it raises none."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def small_pieces(small: bool) -> AbstractContextManager[None]:
    """Let queries of small models take the paths of large ones: step by step, in pieces, without a table."""
    return pieces.limit(8) if small else nullcontext()


def campaign(
    seeds: Sequence[int], device: str = "cpu", kind: type[Fuzz] = Fuzz, impl: Impl | None = None
) -> tuple[Counter[str], list[str]]:
    """Return the numbers of right answers by kind of answer, and the wrong ones.

    `impl` is that of all models, which then are of two matrices; by default it is drawn.
    """
    right, wrong = Counter[str](), list[str]()
    for seed in seeds:
        done = kind(seed, device, impl).run()
        right += done.right
        wrong += done.wrong
        for line in done.wrong:
            print(f"WRONG {line}", flush=True)
    return right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others follow")
    parser.add_argument("--count", type=int, default=1000, help="number of models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--unions", action="store_true", help="unions instead of single models")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    right, wrong = campaign(seeds, arguments.device, UnionFuzz if arguments.unions else Fuzz)
    for name, count in sorted(right.items()):
        print(f"{count:8d} right: {name}")
    print(f"{arguments.count} models, {right.total() + len(wrong)} answers, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
