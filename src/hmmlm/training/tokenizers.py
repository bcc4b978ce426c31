"""The tokenizer of a training text: as configured, or chosen by the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice

from hmmlm.config.sections import (
    AutoTokenizerConfig,
    BpeTokenizerConfig,
    FileTokenizerConfig,
    TokenizerConfig,
    WordTokenizerConfig,
)
from hmmlm.data.corpora import Documents
from hmmlm.data.tokenizers import HuggingFaceTokenizer, Tokenizer, WordTokenizer, find_tokenizer
from hmmlm.data.words import Split, count_words
from hmmlm.runs.progress import Progress

MOST_UNKNOWN, MOST_WORDS = 0.15, 30_000  # of the held-out words, and in a vocabulary that is enlarged to know the rest
CHARACTERS_PER_SPACE, MOST_CHARACTERS = 20, 500  # of a text that is read by characters, in the first lines
_LINES = 4_000


def make_tokenizer(
    config: TokenizerConfig,
    splits: Mapping[str, Documents],
    progress: Progress,
    count: Callable[[Split, bool], Counter[str]] | None = None,
) -> Tokenizer:
    """Return the tokenizer of a text.

    `count`: counts the words of its training split, given `split` and `lowercase`; None: in this process.
    """
    train, valid = splits["train"], splits["valid"]
    count = count or (lambda split, lowercase: count_words(_read_lines(train, progress), split, lowercase))
    if isinstance(config, FileTokenizerConfig):
        return find_tokenizer(config.file)
    if isinstance(config, WordTokenizerConfig):
        counts = count(config.split, config.lowercase)
        return WordTokenizer.from_counts(
            counts, config.vocab_size, config.min_count, split=config.split, lowercase=config.lowercase
        )
    if not isinstance(config, AutoTokenizerConfig):
        size = config.vocab_size if isinstance(config, BpeTokenizerConfig) else None
        return HuggingFaceTokenizer.train(_read_lines(train, progress), size)
    held_out = count_words(_read_lines(valid, progress), "words", False)
    made: Tokenizer
    made, unknown = WordTokenizer.covering(count("words", False), held_out, MOST_UNKNOWN, MOST_WORDS)
    kind, are = "word", "are unknown"
    if unknown > MOST_UNKNOWN:
        kind, are = "char" if _is_unspaced(train) else "bpe", "would be unknown to a word vocabulary"
        size = BpeTokenizerConfig().vocab_size if kind == "bpe" else None
        made = HuggingFaceTokenizer.train(_read_lines(train, progress), size)
    share = f"{unknown:.1%} of the held-out words {are}; --tokenizer.kind overrides"
    progress.note(f"tokenizer: {kind}, {made.vocab_size:,} tokens: {share}")
    return made


def _read_lines(documents: Documents, progress: Progress) -> Iterator[str]:
    """Yield the lines of documents, from which a tokenizer is made."""
    with progress.phase("tokenizer", unit="lines") as phase:
        for document in documents:
            yield from document
            phase.advance(len(document))


def _is_unspaced(documents: Documents) -> bool:
    """Return whether a text has few spaces and few different characters."""
    text = "".join(islice(chain.from_iterable(documents), _LINES))
    spaces = sum(map(str.isspace, text))
    return spaces * CHARACTERS_PER_SPACE < len(text) and len(set(text)) <= MOST_CHARACTERS
