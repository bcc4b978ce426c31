"""Texts as the sequences that an HMM reads: their scores, those of their tokens, and their states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.checks import check_texts, padded
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.textmodel import TextModel
from hmmlm.ops.pieces import at_once

_BATCH_TOKENS = 1 << 13  # tokens scored together


class SequenceModel(TextModel):
    """An HMM that reads texts; its training configuration says where the chain restarts."""

    hmm: HMM

    @property
    def device(self) -> torch.device:
        return self.hmm.device

    @property
    def restarts(self) -> bool:
        """Whether the chain restarts from the start distribution after every `<eos>`."""
        batches = self.config.get("batches", {})
        return batches.get("kind") == "stream" and bool(batches.get("eval_reset_at_eos"))

    @property
    def chunk(self) -> int | None:
        """The number of tokens after which the chain restarts; None: only `restarts` decides."""
        batches = self.config.get("batches", {})
        length = batches.get("length") if batches.get("kind") == "chunks" else None
        return None if length is None else int(length)

    @check_arguments
    def sequences(self, tokens: Sequence[int]) -> list[list[int]]:
        """Split the tokens of a text into the sequences that are scored: one, or one per line or chunk.

        The chain starts from the start distribution in each.
        """
        if self.chunk is not None:
            return [list(tokens[i : i + self.chunk]) for i in range(0, len(tokens), self.chunk)]
        if not self.restarts:
            return [list(tokens)] if len(tokens) else []
        *lines, rest = split_at(tokens, self._eos)
        return [[*line, self._eos] for line in lines] + ([rest] if rest else [])

    @torch.no_grad()
    def score(self, texts: Sequence[str], given: str | Sequence[str] | None = None) -> Tensor:
        """Compute the natural log-likelihood of each text, `<eos>` included, [len(texts)]; a single str is an error.

        With `given`, a text or one for each, compute log p(text | given): of what follows `given` in the same line, or
        in a new one if `given` ends with a line break.
        """
        if given is not None:
            return self._score_given(texts, given)
        encoded = self._encode_all(texts)
        sequences, owner = self._parts(encoded)
        scores = torch.zeros(len(encoded), dtype=torch.float64)  # a text may have many lines
        scores.index_add_(0, torch.tensor(owner, dtype=torch.long), self.score_sequences(sequences))
        return scores.to(self.hmm.dtype)

    @torch.no_grad()
    @check_arguments
    def score_sequences(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Compute the log-likelihood of each sequence of tokens, float64 [N]; see `sequences`."""
        scores = torch.zeros(len(sequences), dtype=torch.float64)
        for chosen in length_batches([len(tokens) for tokens in sequences]):
            log_likelihood = self.hmm.log_likelihood(*padded([sequences[i] for i in chosen]))
            scores[torch.tensor(chosen)] = log_likelihood.cpu().double()
        return scores

    def _score_given(self, texts: Sequence[str], given: str | Sequence[str]) -> Tensor:
        check_texts(texts)
        before = [given] * len(texts) if isinstance(given, str) else given
        if not isinstance(before, list | tuple):
            raise InputError(f"given is a {type(given).__name__}, not a string or a list of strings")
        if len(before) != len(texts):
            raise InputError(f"given has {len(before)} texts for {len(texts)}: give one for each, or one for all")
        prefixes = [self._encode_prompt(text) for text in before]
        whole = []
        for first, prefix, text in zip(before, prefixes, texts, strict=True):
            space = "" if not first or first[-1].isspace() else " "
            both = self.encode(first + space + text)
            if not text and prefix[-1:] == [self._eos]:  # an empty example
                both = [*prefix, self._eos]
            # A tokenizer may join the two: then the text is encoded alone.
            whole.append(both if both[: len(prefix)] == prefix else [*prefix, *self.encode(text)])
        scores = []
        for number, (prefix, log_probs) in enumerate(zip(prefixes, self.token_log_probs(whole), strict=True)):
            if bool((log_probs[: len(prefix)] == -math.inf).any()):
                raise InputError(f"given, of text {number}, has probability zero under the model")
            scores.append(log_probs[len(prefix) :].sum(dtype=torch.float64))
        return torch.stack(scores).to(self.hmm.dtype) if scores else torch.zeros(0, dtype=self.hmm.dtype)

    @torch.no_grad()
    def states(self, texts: Sequence[str]) -> list[list[tuple[str, int, float]]]:
        """Find the states of every token of each text: (token, state, probability).

        The states are the most likely sequence of states (Viterbi); the probability is p(state | text) of each. For all
        probabilities, ask `lm.hmm.posterior`.
        """
        encoded = self._encode_all(texts)
        sequences, owner = self._parts(encoded)
        found: list[list[tuple[int, float]]] = [[] for _ in sequences]
        for chosen in length_batches([len(tokens) for tokens in sequences], self._lattice_tokens):
            batch = padded([sequences[i] for i in chosen])
            path = self.hmm.viterbi(*batch)[0]
            probs = self.hmm.posterior(*batch).gather(2, path.clamp(min=0)[..., None])[..., 0]
            for i, states, ps in zip(chosen, path.tolist(), probs.tolist(), strict=True):
                found[i] = list(zip(states, ps, strict=True))[: len(sequences[i])]
        result: list[list[tuple[str, int, float]]] = [[] for _ in encoded]
        for i, tokens, pairs in zip(owner, sequences, found, strict=True):
            result[i] += [(self.tokenizer.token(t), state, p) for t, (state, p) in zip(tokens, pairs, strict=True)]
        return result

    def _parts(self, encoded: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Return the sequences that texts are scored in, and the text [sequences] that each belongs to."""
        parts = [(part, i) for i, tokens in enumerate(encoded) for part in self.sequences(tokens)]
        return [part for part, _ in parts], [i for _, i in parts]

    @property
    def _lattice_tokens(self) -> int:
        """Return how many tokens a query that keeps tokens × states may process together."""
        return min(_BATCH_TOKENS, at_once(self.hmm.num_states, 2**25))

    @torch.no_grad()
    @check_arguments
    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute log p(token | tokens before it) of each text, given as tokens: [T] float64, on the CPU.

        An impossible token and those after it in its sequence have −inf.
        """
        sequences, owner = self._parts(encoded)
        found = [torch.zeros(0, dtype=torch.float64) for _ in sequences]
        for chosen in length_batches([len(tokens) for tokens in sequences], self._lattice_tokens):
            tokens, lengths = padded([sequences[i] for i in chosen])
            log_probs = self.hmm.token_log_probs(tokens, lengths).double().cpu()
            for i, row, length in zip(chosen, log_probs, lengths.tolist(), strict=True):
                found[i] = row[:length]
        by_text: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.float64)] for _ in encoded]
        for i, row in zip(owner, found, strict=True):
            by_text[i].append(row)
        return [torch.cat(rows) for rows in by_text]


def length_batches(lengths: Sequence[int], tokens: int | None = None) -> Iterator[list[int]]:
    """Yield indices of texts of similar length, at most `tokens` padded tokens together (or one text)."""
    tokens = at_once(1, _BATCH_TOKENS) if tokens is None else tokens
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
