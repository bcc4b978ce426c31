"""A model of text: what follows from its tokenizer and the log-probabilities of tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hmmlm.arguments import check_keywords, check_type, is_sequence
from hmmlm.checks import check_seed, check_text, check_texts
from hmmlm.constrain.constraint import Constraint, ConstraintOptions, Wanted
from hmmlm.data.text import split_units
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError, warn
from hmmlm.lm.generation import Rows, SamplingOptions, collect
from hmmlm.lm.scoring import perplexity


class GenerateOptions(ConstraintOptions, total=False):
    """The options of `generate`, beside its prompt and number of samples."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    allow_unk: bool
    must: Sequence[Wanted]
    never: Sequence[str]


class TextModel(ABC):
    """A model over the tokens of `tokenizer`; every example of a text, a line as a rule, ends with `<eos>`."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    """The training configuration, stored unchanged."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute log p(token | tokens before it) of each text, given as tokens: [T] float64, on the CPU."""

    @abstractmethod
    def score(self, texts: Sequence[str]) -> Tensor:
        """Compute the natural log-likelihood of each text, `<eos>` included, [len(texts)]."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text as they are scored: `<eos>` after every example; an empty text is one `<eos>`."""
        return [token for example in self.examples(text) for token in (*self.tokenizer.encode(example), self._eos)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, such as a row of a batch, without the `<eos>` tokens that end or fill it."""
        kept = len(tokens)
        while kept and tokens[kept - 1] == self._eos:
            kept -= 1
        return self.tokenizer.decode(tokens[:kept])

    def examples(self, text: str) -> list[str]:
        """Return the examples of a text, each of which ends with `<eos>`: lines, or paragraphs."""
        check_text("the text", text)
        return list(split_units(text, self._unit))

    def token_scores(self, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Compute log p(token | tokens before it) for every token of each text, with the token; `<eos>` included.

        The scores of a text add up to its `score`; an impossible token and those after it have −inf.
        """
        encoded = self._encode_all(texts)
        return [
            [(self.tokenizer.token(i), p) for i, p in zip(tokens, log_probs.tolist(), strict=True)]
            for tokens, log_probs in zip(encoded, self.token_log_probs(encoded), strict=True)
        ]

    def perplexity(self, texts: Sequence[str]) -> float:
        """Compute exp(−Σ log p / Σ tokens) over all texts, `<eos>` and `<unk>` counted.

        It is infinite if a text is impossible. For a whole file as one text it is what `hmmlm eval` prints.
        """
        tokens = sum(map(len, self._encode_all(texts)))
        if not tokens:
            raise InputError("perplexity needs at least one text")
        return perplexity(float(self.score(texts).double().sum()), tokens)

    @overload
    def generate(self, prompt: str = ..., **options: Unpack[GenerateOptions]) -> str: ...
    @overload
    def generate(self, prompt: str = ..., *, num_samples: int, **options: Unpack[GenerateOptions]) -> list[str]: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Unpack[GenerateOptions]) -> list[str]: ...
    @overload
    def generate(
        self, prompt: str = ..., *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Iterator[str]: ...
    @overload
    def generate(
        self, prompt: Any, *, num_samples: int | None, stream: bool = ..., **options: Unpack[GenerateOptions]
    ) -> Any: ...
    @check_keywords
    def generate(
        self,
        prompt: Any = "",
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        allow_unk: bool = True,
        must: Sequence[Wanted] = (),
        never: Sequence[str] = (),
        num_samples: int | None = None,
        top_p: float = 1.0,
        stream: bool = False,
        **constraint: Unpack[ConstraintOptions],
    ) -> Any:
        """Return `prompt` and an exact sample of its continuation, until `<eos>` or `max_new_tokens`.

        With `num_samples`, return a list of that many samples, drawn together; sample i is the one of seed + i. Of a
        list of prompts, return a list with one result for each; sample i of prompt j has the seed of number j ·
        num_samples + i. With stream=True, return an iterator of the pieces of the text, `prompt` first; of several
        texts, it yields pairs (number of the text, piece), one prompt after another.

        Temperature 0 takes the most likely token every time; `top_k` samples among the k most likely, `top_p` among
        the fewest most likely whose probabilities, given the constraint, add up to it; the same seed gives the same
        text; with allow_unk=False every token is drawn given that it is not `<unk>`. A prompt that ends with a line
        break starts a new line; spaces at its end are ignored.

        With a constraint (see `hmmlm.Constraint`) the line is drawn given that it satisfies the constraint and ends
        within `max_new_tokens`, `<eos>` counted. The line contains `must` and not `never`, with match="word", "prefix"
        or "substring". The new text is one of `choice`, matches `regex`, is JSON of the schema `json`, has a number of
        `words` or `tokens` such as (5, 12), ends with `suffix`, or is accepted by `automaton`. With allow_unk=False it
        also has no `<unk>`.
        """
        check_type("allow_unk", allow_unk, bool)
        check_type("stream", stream, bool)
        count = 1 if num_samples is None else num_samples
        options = SamplingOptions(max_new_tokens, temperature, top_k, seed, count, top_p)
        asked, several = Constraint(must, never, **constraint), is_sequence(prompt)
        prompts = list(prompt) if several else [prompt]
        check_seed(seed, max(count * len(prompts), 1))
        encoded = [self._encode_prompt(each) for each in prompts]
        sampled = (
            self._sample(given, asked, options if seed is None else replace(options, seed=seed + j * count), allow_unk)
            for j, given in enumerate(encoded)
        )
        numbered = enumerate(zip(prompts, encoded, sampled, strict=True))
        if not stream:
            found = [self._continued(each, given, collect(steps)) for _, (each, given, steps) in numbered]
            results = [texts[0] if num_samples is None else texts for texts in found]
            return results if several else results[0]
        pieces = ((j * count + i, piece) for j, given in numbered for i, piece in self._pieces(*given))
        return pieces if several or num_samples is not None else (piece for _, piece in pieces)

    @abstractmethod
    def _sample(self, given: list[int], asked: Constraint, options: SamplingOptions, allow_unk: bool) -> Iterator[Rows]:
        """Yield samples of what follows tokens, after every token; see `sample_continuations`."""

    def _pieces(self, prompt: str, given: list[int], steps: Iterator[Rows]) -> Iterator[tuple[int, str]]:
        """Yield the number of a sample and a piece of its text, as soon as it is known; incomplete characters wait."""
        texts: dict[int, tuple[int, str, str]] = {}  # tokens, text so far, and what of it was yielded
        for rows in steps:
            for i, tokens in zip(rows.samples, rows.tokens, strict=True):
                count, text, sent = texts.get(i, (-1, "", ""))
                if len(tokens) > count:
                    text = self._continued(prompt, given, [tokens])[0]
                    if text.startswith(sent) and not text.endswith("\ufffd"):
                        yield from [(i, text[len(sent) :])] * (text != sent)
                        sent = text
                    texts[i] = len(tokens), text, sent
        yield from ((i, text[len(sent) :]) for i, (_, text, sent) in texts.items() if text != sent)

    @property
    def _unit(self) -> str:
        """What an example is: "line", "paragraph" or "document"."""
        return str(self.config.get("text", {}).get("unit", "line"))

    @property
    def _eos(self) -> int:
        return self.tokenizer.eos_id

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; raise an InputError unless `texts` is a list of strings."""
        check_texts(texts)
        return [self.encode(text) for text in texts]

    def _encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, with `<eos>` between its lines; warn about words outside the vocabulary."""
        check_text("the prompt", prompt)
        first, *others = (self.tokenizer.encode(unit) for unit in split_units(prompt, self._unit))
        tokens = [*first, *(token for unit in others for token in (self._eos, *unit))]
        ending = "\n" if self._unit == "line" else "\n\n"
        if re.sub(r"[^\S\n]+", "", prompt).endswith(ending):  # a new example starts
            tokens.append(self._eos)
        unk = self.tokenizer.unk_id
        if unk is not None and unk in tokens:
            own = self.tokenizer.token(unk)
            unknown = [word for word in prompt.split() if word != own and unk in self.tokenizer.encode(word)]
            if unknown:
                words = ", ".join(map(repr, dict.fromkeys(unknown)))
                warn(f"outside the vocabulary, read as {own}: {words}")
        return tokens

    def _continued(self, prompt: str, given: list[int], added: Sequence[Sequence[int]]) -> list[str]:
        """Return the prompt with each continuation; it is returned as it was written, unknown words included."""
        known = len(self.tokenizer.decode(given))
        ends = [self.tokenizer.decode([*given, *tokens])[known:] for tokens in added]
        return [prompt + (end.lstrip(" ") if prompt.endswith((" ", "\t")) else end) for end in ends]
