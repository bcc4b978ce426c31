"""Types of the catalogue: one `Study` declares everything about a table or figure.

Labels of a row (group, series, x, ...) are fields. Row names are identifiers shared with the results files; no code
reads anything out of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from papers.rows import Results

RESULTS_PAGES = Path("docs/reproduction/results")
Record = Mapping[str, Any]
"""A run in a results file: row, recipe, seed, metrics, settings, command, commit, machine, date; all but row and
metrics may be missing."""
BASELINE = "baseline"
"""Recipe of a row that `hmmlm baseline` trains."""
NGRAM = "ngram"
"""Recipe of a row that `hmmlm ngram` counts."""
VALID, TEST, TRAIN = "valid_perplexity", "test_perplexity", "train_perplexity"
PARAMETERS = "parameters"
"""A metric that is no part of records: it follows from their settings."""
STEP, FORWARD = "step_ms", "forward_ms"
TIMES = "chiu2020-time"
"""The study of `FORWARD`, by the names of rows of other studies."""
PERPLEXITY_COLUMNS = (
    "paper valid",
    "paper test",
    "paper train",
    "valid",
    "test",
    "train",
    "tokens",
    "ms per step",
    "peak GB",
    "minutes",
)
RATIO_COLUMNS = (
    "paper test",
    "valid",
    "test",
    "ratio to scalar",
    "paper's ratio",
    "train",
    "tokens",
    "ms per step",
    "peak GB",
)


@dataclass(frozen=True)
class Paper:
    """A paper and the page that compares its claims with our results."""

    name: str
    page: str


CHIU = Paper("Chiu & Rush 2020", "docs/reproduction/chiu2020.md")
LEE = Paper("Lee & Berg-Kirkpatrick 2025", "docs/reproduction/lee2025.md")


@dataclass(frozen=True)
class NetworkStart:
    """How the network of a transformer parameterization starts."""

    network: str
    kind: str
    """Its weights, and whether LVD comes first: a row of Table 4 of Lee & Berg-Kirkpatrick 2025."""
    spreads: tuple[str, ...]
    """How state embeddings are spread; several where the choices coincide."""
    rate: float
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Models of other rows, trained with the seed of the run, as one model; weights by EM on the validation text."""

    parts: tuple[StudyRow, ...]
    mixed: Literal["sequence", "token"]
    """sequence: their union, one HMM (`hmmlm join`); token: interpolated per word (`hmmlm mix`)."""
    ngram: int = 0
    """Order of a Kneser-Ney n-gram beside them (mixed per token); 0: none."""
    cache: int = 0
    """Words of a cache beside them (mixed per token); 0: none."""
    recent: int = 0
    """Half-life of recent words, to which the HMMs adapt (mixed per token); 0: none."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """A row of a table or a point of a figure: how it is run, and its labels."""

    name: str
    """As in the results file."""
    recipe: str = ""
    """A recipe, a variant of one (`papers.variants`), or `BASELINE`; empty for a row that is not run from here."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the recipe, by dotted name."""
    seeds: tuple[int, ...] = ()
    also: tuple[Mapping[str, Any], ...] = ()
    """Changes to the settings with which the row was run too, with its first seed; the table names them in brackets."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the paper prints for it."""
    group: str = ""
    """Data set, number of states or network; rows of the same group are compared with each other."""
    is_baseline: bool = False
    """Whether rows of its group are given as ratios to it."""
    drawn: bool = True
    bar: str = ""
    """Label of its bar; the row name if empty."""
    series: str = ""
    """The line, or the color of the bar, that it belongs to."""
    style: str = ""
    """Second part of the series name; lines of one series share a color, lines of one style a dash pattern."""
    x: float | None = None
    tick: str = ""
    """Text at `x`; the drawing's format if empty."""
    start: NetworkStart | None = None
    combine: Combination | None = None
    """Of a row that combines models of other rows; `recipe` is then that of its first part."""
    headline: str = ""
    """Its text in the table of README.md; rows without one are left out of it."""
    teacher: StudyRow | None = None
    """The baseline whose next words it learns. The first seed of it is trained before, in the folder of the runs."""


@dataclass(frozen=True)
class StudyRun:
    """One training run: a row with a seed."""

    row: StudyRow
    seed: int


@dataclass(frozen=True)
class NotRun:
    """Planned runs that have no record, and why."""

    reason: str
    rows: tuple[str, ...] = ()
    """Names of rows; all if empty."""
    seeds: tuple[int, ...] = ()
    """All if empty."""

    def __contains__(self, run: StudyRun) -> bool:
        return (not self.rows or run.row.name in self.rows) and (not self.seeds or run.seed in self.seeds)


UNSPENT = "planned; no GPU minutes were spent on it yet"


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, one per row and series, beside the paper's value."""

    metric: str
    axis: str


@dataclass(frozen=True)
class Lines:
    """One line per series over a logarithmic x, with the paper's values as crosses."""

    metric: str
    axis: str
    x_axis: str
    tick: Callable[[float], str] = "{:,.0f}".format
    """Text of an x."""
    top: float | None = None
    """Upper end of the metric axis; lines may leave it."""
    slopes: bool = False
    """Draw both axes logarithmically, and name the slope of each line: the power of x that the metric grows with."""


@dataclass(frozen=True)
class Cell:
    """A number of a results table."""

    row: str
    label: str = ""
    """Its name within a chain."""
    metric: str = TEST
    statistic: Literal["mean", "range"] = "mean"
    """Over the seeds."""
    study: str = ""
    """Where it is not the study of the claim."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and the rule that decides whether it holds here.

    ascending, descending: in every chain each cell is smaller (larger) than all that follow it, and `factor` times
    smaller (larger) up to `tolerance`.
    diminishing: in every chain the step from each cell to the next is smaller than the one before it.
    similar: the cells of every chain differ by at most `tolerance`, relative to the smallest.
    reached: every cell is at most `tolerance` above the number that the paper prints for it.
    """

    text: str
    rule: Literal["ascending", "descending", "diminishing", "similar", "reached"]
    chains: Mapping[str, tuple[Cell, ...]]
    """Cells that are compared with each other, by the name of the comparison; a single one may have none."""
    tolerance: float = 0.0
    factor: float = 1.0
    show: Literal["values", "change"] = "values"
    """Show all numbers, or for every chain the change from its last cell to its first."""


@dataclass(frozen=True)
class Topic:
    """A page of tables and figures, docs/reproduction/results/NAME.md."""

    name: str
    title: str


LOWEST = Topic("record", "The lowest perplexities")
CHIU_TABLES = Topic("chiu2020-tables", f"{CHIU.name}: tables")
CHIU_SIZES = Topic("chiu2020-sizes", f"{CHIU.name}: states, blocks, speed")
CHIU_TRIALS = Topic("chiu2020-trials", f"{CHIU.name}: trials of settings")
LEE_FORMS = Topic("lee2025-reparameterization", f"{LEE.name}: reparameterization")
LEE_LVD = Topic("lee2025-distillation", f"{LEE.name}: latent variable distillation")
LEE_NETWORKS = Topic("lee2025-transfer", f"{LEE.name}: pretrained networks")
LEE_TRIALS = Topic("lee2025-trials", f"{LEE.name}: trials of settings")
LEE_CPU = Topic("lee2025-two-cores", f"{LEE.name}: trials on two cores")
SPEED = Topic("speed", "Speed and memory")
CONTROL = Topic("control", "Constrained text")
OTHER = Topic("other", "Other measurements")
TOPICS = (
    LOWEST,
    CHIU_TABLES,
    CHIU_SIZES,
    CHIU_TRIALS,
    LEE_FORMS,
    LEE_LVD,
    LEE_NETWORKS,
    LEE_TRIALS,
    LEE_CPU,
    SPEED,
    CONTROL,
    OTHER,
)
"""In the order of the index."""


@dataclass(frozen=True)
class Summary:
    """A table over several studies, made from labels."""

    title: str
    text: str
    build: Callable[[Results], list[list[str]]]
    """Returns rows of cells, header first."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure: its rows, how it is tabulated and drawn, and what the paper claims about it."""

    name: str
    """Stem of its results file."""
    title: str
    paper: Paper | None = None
    topic: Topic = OTHER
    """The page that it is published on."""
    rows: tuple[StudyRow, ...] = ()
    """Rows of the results file that are not declared here are published below them, without labels."""
    not_run: tuple[NotRun, ...] = ()
    as_recorded: bool = False
    """Whether rows of the results file that are not declared here are planned as they were recorded: trials by hand."""
    trials: bool = False
    """Whether it only compares settings, to choose among them."""
    device: Literal["GPU", "CPU"] = "GPU"
    data: str = ""
    """Its data set, where that is not the one of its recipes."""
    made_by: str = ""
    """The command that makes its records, where it is not `python -m papers`."""
    drawing: Bars | Lines | None = None
    columns: tuple[str, ...] = PERPLEXITY_COLUMNS
    """Columns of its table, of those in `papers.tables`; empty columns are left out."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of further metrics that its records have."""
    part_of: Callable[[str], str] = lambda row: ""
    """Heading of the table that a row stands in, where rows of different kinds need tables of their own."""
    claims: tuple[Claim, ...] = ()
    summaries: tuple[Summary, ...] = ()

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        for row in self.rows:
            if names.count(row.name) > 1:
                raise ValueError(f"study {self.name}: two rows are named {row.name!r}")
            if isinstance(self.drawing, Lines) and row.drawn and row.x is None:
                raise ValueError(f"study {self.name}: row {row.name!r} needs an x, or drawn=False")

    def address(self, page: str) -> str:
        """Return where the study is published, relative to a page of the repository."""
        return f"{os.path.relpath(RESULTS_PAGES / self.topic.name, Path(page).parent)}.md#{self.name}"

    @property
    def runs(self) -> list[StudyRun]:
        """Every run; the first seed of every row comes before the second of any."""
        also = [(row, settings) for row in self.rows for settings in row.also]
        others = [replace(row, settings={**row.settings, **more}, seeds=row.seeds[:1]) for row, more in also]
        rows = [*self.rows, *others]
        most = max((len(row.seeds) for row in rows), default=0)
        return [StudyRun(row, row.seeds[n]) for n in range(most) for row in rows if n < len(row.seeds)]
