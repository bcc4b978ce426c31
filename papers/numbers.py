"""Numbers in the text of pages: links whose title names the record that they come from.

    [109.6](results/chiu2020-tables.md#chiu2020-table1 "chiu2020-table1: PTB, VL-HMM 2^15: test")

A title names a study, a row and a metric. Two of them with `over`, `below` or `above` between are a ratio, or a
difference in percent of the second. `publish` fills in text and address; text and code that name a number otherwise are
found by `unrecorded`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from hmmlm.errors import InputError
from papers.rows import Results, main_rows
from papers.study import FORWARD, PARAMETERS, STEP, TEST, TRAIN, VALID, Study
from papers.tables import count

LINK = re.compile(r'\[([^\]\[]*)\]\([^)\s]*\s"([^"]+: [^"]+: [^"]+)"\)')
STUDY_LINK = re.compile(r"\]\([^)\s]*results[^)\s]*#([\w-]+)\)")
"""A link to the table of a study, whose page may change."""
METRICS = {"valid": VALID, "test": TEST, "train": TRAIN}
"""Short names of metrics."""


def _percent(share: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"


COMPARISONS: dict[str, Callable[[float, float], str]] = {
    " over ": lambda a, b: f"{a / b:.2f}",
    " times below ": lambda a, b: f"{b / a:.1f}",
    " below ": lambda a, b: _percent(1 - a / b),
    " above ": lambda a, b: _percent(a / b - 1),
}
FORMATS: dict[str, Callable[[float], str]] = {
    "tokens_per_second": lambda value: f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value:,.0f}",
    **dict.fromkeys((STEP, FORWARD, "evaluation_ms", "epoch_seconds"), "{:.3g}".format),
    PARAMETERS: count,
    "epochs": "{:.3g}".format,
    "peak_memory_gb": "{:.3g}".format,
    "seconds": "{:.0f}".format,
    "minutes": "{:.1f}".format,
    **dict.fromkeys(("log_prob_per_token", "log_probability_a_token"), "{:.2f}".format),
}
"""Text of metrics that are not perplexities."""


def fill(text: str, page: str, studies: Mapping[str, Study], results: Results) -> str:
    """Return the text of a page with the present text, and the address of the study, of every link to a record."""

    def filled(match: re.Match[str]) -> str:
        title = match[2]
        try:
            return f'[{number_text(title, results)}]({studies[title.partition(": ")[0]].address(page)} "{title}")'
        except KeyError as error:
            raise InputError(f"{page}: the number {match[1]!r} names {title!r}: there is no {error.args[0]}") from None

    def linked(match: re.Match[str]) -> str:
        study = studies.get(match[1])
        return match[0] if study is None else f"]({study.address(page)})"

    return LINK.sub(filled, STUDY_LINK.sub(linked, text))


def number_text(title: str, results: Results) -> str:
    """Return the text of the number that a title names; raise a KeyError that says what does not exist."""
    for word, compare in COMPARISONS.items():
        first, found, second = title.partition(word)
        if found:
            return compare(_value(first, results)[0], _value(second, results)[0])
    value, metric = _value(title, results)
    return FORMATS.get(metric, "{:.1f}".format)(value)


def _value(name: str, results: Results) -> tuple[float, str]:
    """Return the mean over the seeds that "study: row: metric" names, and the metric."""
    study, _, rest = name.partition(": ")
    row, _, metric = rest.rpartition(": ")
    if study not in results:
        raise KeyError(f"study {study!r}")
    rows = {measured.name: measured for measured in main_rows(results[study])}
    if row not in rows:
        raise KeyError(f"row {row!r} of {study}")
    short = metric.removeprefix("paper ")
    key = METRICS.get(short, "seconds" if short == "minutes" else short)
    value = rows[row].plan.paper.get(key) if metric != short else rows[row].mean(key)
    if value is None:
        raise KeyError(f"metric {metric!r} of {row!r}")
    return (value / 60 if metric == "minutes" else value), metric


MEASURED = re.compile(
    r"(?<![\w.^×])(?:\d[\d,]*\.\d+|\d[\d,]*)\s?%"  # shares and changes
    r"|(?<!\d )× ?\d[\d.]*(?! tokens)|(?:\d[\d.]*|twice|\w+ times) (?:as (?:fast|large|long)|faster|slower)"  # ratios
    r"|\d[\d.]*(?: ?[×x]|-fold) (?:faster|slower|less|more)|speed-?up of \d[\d.]*"
    r"|\d[\d.]* times (?:as |less|more|faster|longer)"
    r"|\d[\d.,]*\s(?:µs|ms|s|seconds?|minutes?|min|hours?|h)\b"  # times
    r"|\d[\d.,]*[kM]? (?:tok|tokens|words|sequences)(?:/s| (?:per|a) second)"  # speeds
    r"|(?<![\w.])\d{2,4}\.\d\d?\b(?!\.\d)(?! ?(?:GB|MB|kB|M\b))"  # perplexities
    r"|\b\d{1,4}(?:\.\d+)? (?:on valid|on test|in perplexity)"
    r"|[Pp]erplexit\w+ (?:of |is |was )?(?:about )?\d[\d.]*"
)
"""What looks like a perplexity, a speed, a time or a ratio."""
SKIPPED = re.compile(r"```.*?```|`[^`\n]*`|<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)
"""Code, and what the publisher writes as a block."""


def unrecorded(text: str, known: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield every number of a page that looks measured and names no record; `known` are numbers of other kinds."""
    plain = LINK.sub("", SKIPPED.sub("", text))
    for match in MEASURED.finditer(plain):
        around = plain[max(match.start() - 40, 0) : match.end() + 40]
        if not any(phrase in around for phrase in known):
            yield " ".join(around.split())
