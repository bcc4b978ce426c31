"""Verdicts on the claims of a paper, computed from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean

from papers.numbers import FORMATS
from papers.rows import Results, main_rows
from papers.study import Cell, Claim, Study

Numbers = Mapping[str, Sequence[float | None]]
"""The numbers of every chain, None where there is none."""
MOST_CHANGES = 6
"""Changes that the cell of a claim lists; of more it shows the range."""


def claims_table(studies: Iterable[Study], results: Results, page: str) -> list[list[str]]:
    """Return the claims of the studies for a page: the paper's numbers, ours and the verdict; header first."""
    lines = [["claim", "paper", "here", "verdict"]]
    for study in studies:
        for claim in study.claims:
            text = claim.text + (f" ([data]({study.address(page)}))" if study.name in results else "")
            here, paper = numbers(claim, study, results)
            printed, ours = _shown(claim, paper, "{:g}".format), _shown(claim, here, "{:.1f}".format)
            lines.append([text, printed or "no number printed", ours or "not run", verdict(claim, here, paper)])
    return lines


def numbers(claim: Claim, study: Study, results: Results) -> tuple[Numbers, Numbers]:
    """Return our numbers for the cells of a claim, and the paper's."""
    pairs = {name: [_pair(cell, study, results) for cell in chain] for name, chain in claim.chains.items()}
    here = {name: [ours for ours, _ in chain] for name, chain in pairs.items()}
    return here, {name: [paper for _, paper in chain] for name, chain in pairs.items()}


def _pair(cell: Cell, study: Study, results: Results) -> tuple[float | None, float | None]:
    """Return our number for a cell and the paper's."""
    plans = {row.name: row for row in study.rows}
    rows = {row.name: row for row in main_rows(results.get(cell.study or study.name, []))}
    plan = rows[cell.row].plan if cell.row in rows else plans.get(cell.row)
    values = rows[cell.row].values(cell.metric) if cell.row in rows else []
    if cell.statistic == "range":
        return (max(values) - min(values) if len(values) > 1 else None), None
    return (fmean(values) if values else None), (plan.paper.get(cell.metric) if plan else None)


def verdict(claim: Claim, here: Numbers, paper: Numbers) -> str:
    """Return whether a claim holds; if it makes several comparisons, for how many of them."""
    compared = [found for name, chain in here.items() for found in _comparisons(claim, chain, paper[name])]
    known = [found for found in compared if found is not None]
    if not known:
        return "not run"
    text = "holds" if all(known) else f"holds for {sum(known)} of {len(known)}" if any(known) else "does not hold"
    return text + (f" ({len(compared) - len(known)} not run)" if len(known) < len(compared) else "")


def _comparisons(claim: Claim, here: Sequence[float | None], paper: Sequence[float | None]) -> Iterator[bool | None]:
    """Yield the outcome of every comparison in a chain, None where a number is missing."""
    if claim.rule == "reached":
        for ours, theirs in zip(here, paper, strict=True):
            yield None if ours is None or theirs is None else ours <= (1 + claim.tolerance) * theirs
    elif claim.rule == "diminishing":
        steps = [None if a is None or b is None else abs(b - a) for a, b in pairwise(here)]
        for first, second in pairwise(steps):
            yield None if first is None or second is None else second < first
    elif claim.rule == "similar":
        known = [value for value in here if value is not None]
        yield None if len(known) < len(here) else max(known) <= (1 + claim.tolerance) * min(known)
    else:
        factor = max(1.0, (1 - claim.tolerance) * claim.factor)
        for first, second in combinations(here if claim.rule == "ascending" else here[::-1], 2):
            yield None if first is None or second is None else factor * first < second


def _shown(claim: Claim, chains: Numbers, shape: Callable[[float], str]) -> str:
    """Return the numbers of a claim as text; chains with equal text are shown once."""
    texts = {name: _chain_text(claim, name, values, shape) for name, values in chains.items()}
    known = {name: text for name, text in texts.items() if text}
    if claim.show == "values" and len(known) > 1 and len(set(known.values())) == 1:
        return next(iter(known.values()))
    if claim.show == "change" and len(known) > MOST_CHANGES:
        ordered = sorted(known.values(), key=lambda text: float(text.rstrip("%")))
        return f"{ordered[0]} to {ordered[-1]} over {len(known)} comparisons"
    return "; ".join(f"{name}: {text}" if name else text for name, text in known.items())


def _chain_text(claim: Claim, name: str, values: Sequence[float | None], shape: Callable[[float], str]) -> str:
    if claim.show == "change":
        first, last = values[0], values[-1]
        return "" if first is None or not last else f"{100 * (first / last - 1):+.1f}%"
    cells = zip(claim.chains[name], values, strict=True)
    texts = ((cell.label, FORMATS.get(cell.metric, shape)(value)) for cell, value in cells if value is not None)
    return " / ".join(" ".join(text).strip() for text in texts)
