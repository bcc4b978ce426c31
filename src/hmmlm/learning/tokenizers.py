"""The tokenizer of a training text: as configured, or chosen by the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

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

MOST_UNKNOWN = 0.15
"""Fraction of held-out words up to which words are chosen; a larger vocabulary is, where the usual one leaves more."""
MOST_WORDS = 30_000
CHARACTERS_PER_SPACE, MOST_CHARACTERS = 20, 500
"""A text with fewer spaces and at most so many different characters is read by characters."""
_SAMPLE = 1 << 20  # characters in which these are counted


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
    count = count or (lambda split, lowercase: count_words(read_lines(train, progress), split, lowercase))
    if isinstance(config, FileTokenizerConfig):
        return find_tokenizer(config.file)
    if isinstance(config, WordTokenizerConfig):
        counts = count(config.split, config.lowercase)
        return WordTokenizer.from_counts(
            counts, config.vocab_size, config.min_count, split=config.split, lowercase=config.lowercase
        )
    reason = ""
    if isinstance(config, AutoTokenizerConfig):
        held_out = count_words(read_lines(valid, progress), "words", False)
        words, unknown = WordTokenizer.covering(count("words", False), held_out, 1 - MOST_UNKNOWN, MOST_WORDS)
        reason = f"{unknown:.1%} of the held-out words would be unknown to a word vocabulary"
        if unknown <= MOST_UNKNOWN:
            reason = f"{unknown:.1%} of the held-out words are unknown"
            progress.note(f"tokenizer: word, {words.vocab_size:,} tokens: {reason}; --tokenizer.kind overrides")
            return words
    size = config.vocab_size if isinstance(config, BpeTokenizerConfig) else None
    if reason and not _is_unspaced(train):
        size = BpeTokenizerConfig().vocab_size
    made = HuggingFaceTokenizer.train(read_lines(train, progress), size)
    if reason:
        kind = "char" if size is None else "bpe"
        progress.note(f"tokenizer: {kind}, {made.vocab_size:,} tokens: {reason}; --tokenizer.kind overrides")
    return made


def read_lines(documents: Documents, progress: Progress) -> Iterator[str]:
    """Yield the lines of documents, from which a tokenizer is made."""
    with progress.phase("tokenizer", unit="lines") as phase:
        for document in documents:
            yield from document
            phase.advance(len(document))


def _is_unspaced(documents: Documents) -> bool:
    """Return whether a text has few spaces and few different characters."""
    characters: Counter[str] = Counter()
    size = 0
    for document in documents:
        for line in document:
            characters.update(line)
            size += len(line)
        if size > _SAMPLE:
            break
    spaces = sum(count for character, count in characters.items() if character.isspace())
    return spaces * CHARACTERS_PER_SPACE < size and len(characters) <= MOST_CHARACTERS
