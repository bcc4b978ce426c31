"""Models for lm-evaluation-harness: `python -m hmmlm.lm.harness --model hmmlm --model_args pretrained=runs/mine`.

Importing this module registers the model "hmmlm"; versions of the harness that read the entry points `lm_eval.models`
need no import. The command is the harness's own, with the model registered.

A line break of a request is `<eos>`, as in training, and blank lines are not counted. A text starts from the start
distribution. There is no longest context, so nothing is truncated.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hmmlm.checks import padded
from hmmlm.errors import InputError, require, warn
from hmmlm.hmm import HMM
from hmmlm.hmm.reader import Reader
from hmmlm.lm.generation import SamplingOptions
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.ops.pieces import at_once

require("eval", "lm_eval", reader="hmmlm.lm.harness")
import lm_eval.models  # noqa: E402, F401  # the harness registers its models only while no other is registered
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402

_TOKENS = 256  # generated at most where a task does not say how many
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN = ("until", "do_sample", "temperature", "top_k", *_COUNTS)
_NEUTRAL = {"top_p": 1, "num_beams": 1, "repetition_penalty": 1, "num_return_sequences": 1, "min_p": 0}
Item = TypeVar("Item")


@register_model("hmmlm")
class HarnessModel(LM):
    """A trained HMM as a model of lm-evaluation-harness.

    Args:
        pretrained: the folder of a model or a run, or a LanguageModel.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        seed: of the first request that is sampled; request i has seed + i, whatever is sampled with it.
        batch_size, max_batch_size: given by the harness, and not used: texts are batched by their number of tokens.
    """

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        device: str | torch.device = "auto",
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if device == "cuda:0":  # the harness's default, on machines without a GPU too
            device = torch.device(device) if torch.cuda.is_available() else "auto"
        self.lm = pretrained if isinstance(pretrained, LanguageModel) else load(pretrained, device)
        self._device, self.seed = self.lm.device, seed
        if self.lm.tokenizer.kind == "word":
            warn(
                f"the model has a closed vocabulary of {self.lm.tokenizer.vocab_size} words and reads all others as "
                "<unk>: do not compare its perplexity, or tasks with such words, with models of subwords"
            )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Compute log p(continuation | context) of each request, and whether every token is the most likely one."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        self._report_unknown(token for _, continuation in pairs for token in continuation)
        log_probs = self.lm.token_log_probs([context + continuation for context, continuation in pairs])
        scores = []
        for (context, _), row in zip(pairs, log_probs, strict=True):
            possible = not bool((row[: len(context)] == -math.inf).any())
            scores.append(float(row[len(context) :].sum()) if possible else -math.inf)
        return list(zip(scores, self._greedy(pairs, scores), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Compute log p(text) of each request, all of it at once."""
        texts = [self._encode(request.args[0]) for request in requests]
        self._report_unknown(token for text in texts for token in text)
        return [float(row.sum()) for row in self.lm.token_log_probs(texts)]

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context until `<eos>`, one of its stop strings, or the number of tokens.

        It is the most likely token every time, or an exact sample if the request has `do_sample` or a temperature.
        """
        rows = []
        for i, request in enumerate(requests):
            context, options = request.args
            given, generator = self._encode(context), torch.Generator().manual_seed(self.seed + i)
            rows.append(_Row(given, self._since_start(given), *_parse_options(options), generator))
        self._report_unknown(token for row in rows for token in row.given)
        groups: dict[Any, list[_Row]] = {}
        for row in sorted(rows, key=lambda row: len(row.context)):
            begun = bool(row.context) if self.lm.chunk is None else len(row.context)
            groups.setdefault((row.sampling, begun), []).append(row)
        for group in groups.values():
            for batch in _batches(group, self._rows):
                self._continue(batch)
        return [row.text for row in rows]

    # --- tokens ---

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text; it ends with `<eos>` only if it ends with a line break or its last paragraph."""
        tokens = self.lm.encode(text)
        unit = self.lm.config.get("text", {}).get("unit", "line")
        breaks = re.sub(r"[^\S\n]+", "", text)
        return tokens if breaks.endswith("\n" if unit == "line" else "\n\n") else tokens[:-1]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of what follows it, as `LanguageModel.score` reads them."""
        before, both = self._encode(context), self._encode(context + continuation)
        # A tokenizer may join the two: then the continuation is encoded alone.
        joined = both[: len(before)] != before
        return before, self._encode(continuation) if joined else both[len(before) :]

    def _since_start(self, tokens: list[int]) -> list[int]:
        """Return the tokens that the next one depends on: those since the chain started."""
        return self.lm.sequences([*tokens, self.lm.tokenizer.eos_id])[-1][:-1]

    def _report_unknown(self, tokens: Iterable[int]) -> None:
        if self.lm.tokenizer.unk_id is None:
            return
        read = list(tokens)
        unknown = read.count(self.lm.tokenizer.unk_id)
        if unknown:
            warn(f"{unknown} of {len(read)} tokens of the requests are outside the vocabulary, read as <unk>")

    # --- predictions ---

    @property
    def _rows(self) -> int:
        """The number of texts that are continued together."""
        return at_once(max(self.lm.hmm.num_states, self.lm.hmm.vocab_size), 2**22)

    @torch.no_grad()
    def _greedy(self, pairs: Sequence[tuple[list[int], list[int]]], scores: Sequence[float]) -> list[bool]:
        """Return whether every token of each continuation is the most likely one after those before it."""
        # Most continuations fail at their first token: only the others are read further.
        greedy = [score > -math.inf for score in scores]
        for step in range(max((len(continuation) for _, continuation in pairs), default=0)):
            waiting = [i for i, (_, continuation) in enumerate(pairs) if greedy[i] and step < len(continuation)]
            before = {i: tuple(self._since_start(pairs[i][0] + pairs[i][1][:step])) for i in waiting}
            contexts = sorted(set(before.values()), key=len)
            best: dict[tuple[int, ...], int] = {}
            for batch in _batches(contexts, self._rows):
                best.update(zip(batch, self._predict(batch).argmax(1).tolist(), strict=True))
            for i in waiting:
                greedy[i] = best[before[i]] == pairs[i][1][step]
        return greedy

    def _predict(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute log p(next token) [n, V] after contexts in ascending order of length."""
        hmm, empty = self.lm.hmm.detach(), sum(not context for context in contexts)
        first = hmm.emit(hmm.begin()).expand(empty, -1)
        if empty == len(contexts):
            return first
        return torch.cat([first, _read_all(hmm, contexts[empty:]).next_tokens()])

    def _continue(self, rows: list[_Row]) -> None:
        """Continue texts with the same options; all their chains have started, or none has.

        If the chain restarts after a number of tokens, they have read as many.
        """
        hmm, chunk, options = self.lm.hmm.detach(), self.lm.chunk, rows[0].sampling
        contexts = [row.context for row in rows]
        reader = _read_all(hmm, contexts) if contexts[0] else None
        if reader is not None and bool((reader.log_filtered.amax(1) == -math.inf).any()):
            raise InputError("a context has probability zero under the model, so nothing can follow it")
        for step in range(options.max_new_tokens):
            if chunk is not None and (len(contexts[0]) + step) % chunk == 0:
                reader = None
            log_probs = hmm.emit(hmm.begin()).expand(len(rows), -1) if reader is None else reader.next_tokens()
            uniform = torch.stack([torch.rand((), generator=row.generator, dtype=torch.float64) for row in rows])
            tokens = options.choose(log_probs, uniform.to(log_probs.device))
            reader = (Reader.start(hmm, tokens) if reader is None else reader.read(tokens))[1]
            going = [i for i, token in enumerate(tokens.tolist()) if rows[i].add(token, self.lm)]
            if not going:
                return
            reader, rows = reader.rows(torch.tensor(going, device=tokens.device)), [rows[i] for i in going]


@dataclass
class _Row:
    """A text that is continued."""

    given: list[int]
    context: list[int]
    """The given tokens that the continuation depends on."""
    until: list[str]
    sampling: SamplingOptions
    generator: torch.Generator
    text: str = ""

    def __post_init__(self) -> None:
        self.added: list[int] = []

    def add(self, token: int, lm: LanguageModel) -> bool:
        """Add a token; return whether the text continues."""
        if token == lm.tokenizer.eos_id:
            return False
        self.added.append(token)
        known = len(lm.tokenizer.decode(self.given))
        text = lm.tokenizer.decode([*self.given, *self.added])[known:]
        ends = [place for stop in self.until if (place := text.find(stop)) >= 0]
        self.text = text[: min(ends)] if ends else text
        return not ends


def _read_all(hmm: HMM, contexts: Sequence[Sequence[int]]) -> Reader:
    """Return the sequences after contexts of at least one token each, in ascending order of length."""
    tokens, lengths = padded(list(map(list, contexts)))
    tokens = tokens.to(hmm.device)
    reader = Reader.start(hmm, tokens[:, 0])[1]
    for t in range(1, tokens.shape[1]):
        ended = int((lengths <= t).sum())
        going = reader.rows(torch.arange(ended, len(tokens), device=hmm.device)).read(tokens[ended:, t])[1]
        log_filtered = torch.cat([reader.log_filtered[:ended], going.log_filtered])
        reader = Reader(hmm, torch.cat([reader.tokens[:ended], going.tokens]), log_filtered)
    return reader


def _batches(items: list[Item], size: int) -> Iterator[list[Item]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _parse_options(options: Mapping[str, Any]) -> tuple[list[str], SamplingOptions]:
    """Return the stop strings and the sampling options of a request."""
    for name, value in options.items():
        if name not in _KNOWN and value is not None and value != _NEUTRAL.get(name):
            raise InputError(f"generation option {name}={value!r} is not supported: leave it out")
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    number = next((options[name] for name in _COUNTS if options.get(name) is not None), _TOKENS)
    sample, temperature = options.get("do_sample"), options.get("temperature")
    if sample is None:
        sample = bool(temperature)
    chosen = (1.0 if temperature is None else temperature) if sample else 0.0
    return [stop for stop in stops if stop], SamplingOptions(number, chosen, options.get("top_k") or None)


def main() -> int:
    """Run the harness's command with the model "hmmlm" registered, and return the exit code."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except InputError as error:
        print(f"hmmlm: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
