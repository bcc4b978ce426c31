"""A model of text: what follows from its tokenizer and the log-probabilities of tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hmmlm.checks import check_text, check_texts
from hmmlm.data.text import split_units
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError, warn
from hmmlm.lm.scoring import perplexity


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
