"""ARPA files of n-grams, as SRILM and KenLM write and read them.

An ARPA file lists log₁₀ p of every known k-gram, and log₁₀ of the mass that its context leaves for unknown
continuations. An interpolated model is such a model too: p of a known k-gram already includes the lower orders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hmmlm.baselines.ngram import IntArray, NgramModel, Order
from hmmlm.data.files import replacing
from hmmlm.data.text import read_lines
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError

BEGIN, END = "<s>", "</s>"
_COUNT = re.compile(r"ngram (\d+)=(\d+)")


def arpa_words(tokenizer: Tokenizer, restarts: bool) -> list[str]:
    """Return a name without white space for each token; no two are equal.

    If the context restarts at eos, its name is `</s>`; otherwise eos is a word like any other.
    """
    names: list[str] = []
    taken = {BEGIN, END}
    for i in range(tokenizer.vocab_size):
        name = tokenizer.token(i)
        if i == tokenizer.eos_id and restarts:
            name = END
        elif name in taken or name.split() != [name] or not name.isprintable():
            name = f"<token-{i}>"
        taken.add(name)
        names.append(name)
    return names


def write_arpa(path: Path, model: NgramModel, words: Sequence[str]) -> None:
    """Write a model as an ARPA file.

    If the context restarts at eos, an eos is `<s>` as the start of a context and `</s>` where it is predicted.
    """
    with replacing(path) as (temporary,), temporary.open("w", encoding="utf-8") as out:
        grams = [np.arange(model.vocab_size)[:, None]]
        for order in model.orders[1:]:
            prefix, last = np.divmod(order.codes, model.vocab_size)
            grams.append(np.concatenate([grams[-1][prefix], last[:, None]], axis=1))
        begins = model.eos is not None and model.order > 1
        out.write("\\data\\\n")
        for k, tokens in enumerate(grams, 1):
            out.write(f"ngram {k}={len(tokens) + (k == 1 and begins)}\n")
        for k, tokens in enumerate(grams, 1):
            out.write(f"\n\\{k}-grams:\n")
            backoff = model.orders[k].backoff if k < model.order else np.ones(len(tokens))
            if k == 1 and begins:
                out.write(f"-99\t{BEGIN}\t{_log10(float(backoff[model.eos or 0]))}\n")
            log_probs = model.gram_log_probs(tokens) / math.log(10)
            for gram, log_prob, left in zip(tokens.tolist(), log_probs.tolist(), backoff.tolist(), strict=False):
                names = [words[token] for token in gram]
                if model.eos is not None and k > 1 and gram[0] == model.eos:
                    names[0] = BEGIN
                # An eos ends its context, and is the context of nothing.
                ends = k == model.order or (model.eos is not None and gram[-1] == model.eos)
                columns = [f"{log_prob:.12g}", " ".join(names)] + ([] if ends or left == 1 else [_log10(left)])
                out.write("\t".join(columns) + "\n")
        out.write("\n\\end\\\n")


def _log10(value: float) -> str:
    return f"{math.log10(value):.12g}"


def read_arpa(path: Path, words: Sequence[str]) -> NgramModel:
    """Return the model in an ARPA file.

    Args:
        words: the name of each token, as `arpa_words` returns them. Each needs a unigram in the file.
    """
    ids = {word: i for i, word in enumerate(words)}
    sections = _read_sections(path, ids)
    grams, log_probs, backoffs = sections[0]
    begins = grams[:, 0] == len(words)  # <s> has an id of its own here: it is a context, and never predicted
    if len(np.unique(grams)) < len(grams):
        raise InputError(f"{path} has a 1-gram twice")
    unigrams, left = np.full(len(words), -np.inf), np.ones(len(words))
    unigrams[grams[~begins, 0]], left[grams[~begins, 0]] = log_probs[~begins], backoffs[~begins]
    if not np.isfinite(unigrams).all():
        missing = words[int(np.flatnonzero(~np.isfinite(unigrams))[0])]
        raise InputError(f"{path} has no unigram {missing!r} of positive probability: it belongs to another vocabulary")
    eos = ids.get(END) if begins.any() else None
    if eos is not None:
        left[eos] = backoffs[begins][0]
    orders = [Order(np.arange(len(words)), np.append(np.exp(unigrams), 0.0), np.array([0.0, 1.0]))]
    for k, (found, gram_log_probs, following) in enumerate(sections[1:], 2):
        tokens = found if eos is None else np.where(found == len(words), eos, found)
        model = NgramModel.from_orders(orders, len(words), eos)
        contexts = model.gram_ids(tokens[:, :-1])
        if (contexts < 0).any():
            gram = " ".join(words[i] for i in tokens[np.flatnonzero(contexts < 0)[0]])
            raise InputError(f"{path} has the {k}-gram {gram!r}, but not its context")
        codes = contexts * len(words) + tokens[:, -1]
        order = np.argsort(codes, kind="stable")
        codes, probs = codes[order], np.exp(gram_log_probs[order])
        if (np.diff(codes) == 0).any():
            raise InputError(f"{path} has a {k}-gram twice")
        table = np.append(left, 1.0)
        lower = np.exp(model.gram_log_probs(tokens[order][:, 1:]))
        orders.append(Order(codes, np.append(probs - table[contexts[order]] * lower, 0.0), table))
        left = following[order]
    return NgramModel.from_orders(orders, len(words), eos)


Section = tuple[IntArray, np.ndarray, np.ndarray]
"""k-grams [N, k], their natural log-probabilities [N] and the mass left by them as contexts [N]."""


def _read_sections(path: Path, ids: dict[str, int]) -> list[Section]:
    """Return the k-grams of every order; `<s>` has the id after the last word."""
    ids = {**ids, BEGIN: len(ids)} if END in ids else ids
    lines = read_lines(path)
    counts: list[int] = []
    for line in lines:
        if match := _COUNT.fullmatch(line):
            counts.append(int(match[2]))
            if int(match[1]) != len(counts):
                raise InputError(f"{path} has {line!r} where the number of {len(counts)}-grams should be")
        elif line == "\\1-grams:" and counts:
            break
    else:
        raise InputError(f"{path} is not an ARPA file: it has no counts and 1-grams")
    sections: list[Section] = []
    for k, count in enumerate(counts, 1):
        rows = list(_rows(path, lines, ids, k))
        if len(rows) != count:
            raise InputError(f"{path} has {len(rows):,} {k}-grams, not {count:,} as its head says: it is damaged")
        tokens, log_probs, backoffs = zip(*rows, strict=True) if rows else ([], [], [])
        shaped = np.array(tokens, dtype=np.int64).reshape(-1, k)
        factor = math.log(10)
        sections.append((shaped, np.array(log_probs) * factor, np.exp(np.array(backoffs) * factor)))
    return sections


def _rows(path: Path, lines: Iterator[str], ids: dict[str, int], k: int) -> Iterator[tuple[list[int], float, float]]:
    """Yield tokens, log₁₀ p and log₁₀ of the backoff of the k-grams, up to the next section."""
    for line in lines:
        if line == "\\end\\" or line == f"\\{k + 1}-grams:":
            return
        if not line:
            continue
        log_prob, *rest = line.split()
        try:
            backoff = float(rest[k]) if len(rest) > k else 0.0
            tokens = [ids[word] for word in rest[:k]]
            if len(tokens) < k or len(rest) > k + 1 or not float(log_prob) <= 0 or not backoff < math.inf:
                raise ValueError
            yield tokens, float(log_prob), backoff
        except KeyError as error:
            raise InputError(
                f"{path} has the word {error.args[0]!r}, which is not in the vocabulary: it belongs to another one, or "
                "is truncated"
            ) from None
        except ValueError:
            raise InputError(f"{path}: {line[:60]!r} is not a {k}-gram with its log-probability") from None
