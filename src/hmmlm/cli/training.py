"""What `hmmlm train`, `teacher` and `baseline` share: their arguments, and where a run is and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSuppress, PydanticBaseSettingsSource

from hmmlm.cli.parse import Arguments
from hmmlm.config.defaults import names_of
from hmmlm.config.explain import explain
from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.recipe import recipe_source, recipe_values
from hmmlm.config.run import RunConfig
from hmmlm.config.training import TrainingConfig, drop_other_kinds
from hmmlm.errors import InputError
from hmmlm.runs.folders import FOLDERS, LATEST, find_run, new_folder, saved_config
from hmmlm.terminal import counted, printable

if TYPE_CHECKING:
    from hmmlm.training.trainer import TrainResult


class StartingPoint(PydanticBaseSettingsSource):
    """The settings that the command line changes: those of a recipe, or of the run that is resumed."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # values are returned by __call__, all at once

    def __call__(self) -> dict[str, Any]:
        given = self.current_state
        sources = [name for name in ("resume", "recipe", "config", "out") if given.get(name) is not None]
        if "resume" in sources and len(sources) > 1:
            raise InputError(f"--resume has the settings and the folder of its run: leave out --{sources[1]}")
        if "recipe" in sources and "config" in sources:
            raise InputError("give --recipe or --config, not both")
        kind = _config_kind(self.settings_cls)
        if "resume" in sources:
            out = find_run(Path(given["resume"]), kind.command)
            values = drop_other_kinds(kind, saved_config(kind, out).dump(), given)
            chosen = values.get("chosen")  # of a run that was killed before its settings were complete
            return values if chosen is None else {**values, "chosen": [*chosen, *names_of(given)]}
        if "config" in sources and not str(given["config"]).endswith(".toml"):
            raise InputError(f"--config {given['config']}: a recipe is a file that ends in .toml")
        name = given.get("config") or given.get("recipe")
        if name is None:
            return {"chosen": names_of(given)} if kind is RunConfig else {}
        return _read_recipe(kind, str(name), given)


def _config_kind(arguments: type[BaseSettings]) -> type[TrainingConfig]:
    """Return the configuration that arguments inherit from."""
    bases = arguments.__mro__
    return next(base for base in bases if issubclass(base, TrainingConfig) and not issubclass(base, BaseSettings))


def _read_recipe(kind: type[TrainingConfig], name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that the given ones do not replace; its mistakes are errors that name it."""
    values = drop_other_kinds(kind, recipe_values(name, command=kind.command), given)
    try:
        kind.model_validate(values)
    except ValidationError as error:
        # What is missing, or does not fit together, may be given on the command line.
        if any(found["type"] not in ("missing", "value_error") for found in error.errors()):
            raise InputError(f"{recipe_source(name)}: {explain(kind, error)}") from None
    return values


class TrainingArguments(Arguments):
    """Where a run is."""

    none_word: ClassVar[str] = "None"
    sources: ClassVar[tuple[type[PydanticBaseSettingsSource], ...]] = (StartingPoint,)
    out: Path | None = None
    """Folder of the run; None: a new one, named after the recipe or the data and the time."""
    resume: Path | None = None
    """Resume the run in this folder (latest: the newest). Its settings stay the same, except how long it trains and
    where."""
    quiet: bool = False
    """Print results and warnings only."""

    @model_validator(mode="before")
    @classmethod
    def _find_latest(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "data": str(find_run(Path(LATEST)))} if values.get("data") == LATEST else values


class RecipeArguments(TrainingArguments):
    """A recipe to start from."""

    recipe: str | None = None
    """A recipe of the package: the settings that the other options change."""
    config: Path | None = None
    """The same, from a TOML file of your own."""
    dry_run: bool = False
    """Run a few steps, print what the run would cost (parameters, memory, time per epoch), and write nothing."""


class TrainArguments(RecipeArguments, RunConfig):  # type: ignore[misc]
    """`hmmlm train`."""

    chosen: CliSuppress[tuple[str, ...] | None] = None
    """Set by `StartingPoint`."""


class TeacherArguments(TrainingArguments, TeacherConfig):  # type: ignore[misc]
    """`hmmlm teacher`."""

    convert: Path | None = None
    """A GGUF file to write as a Hugging Face folder (--out), in float16."""


class BaselineArguments(RecipeArguments, BaselineConfig):  # type: ignore[misc]
    """`hmmlm baseline`."""


def run_training(
    command: str,
    config: TrainingConfig,
    arguments: TrainingArguments,
    name: str,
    train: Callable[[Any, Path, bool, Any], TrainResult],
) -> tuple[TrainResult, bool]:
    """Train in the folder of the arguments, or in a new one: FOLDERS[command]/name-TIME; print how it ended.

    The second result is whether this process, rank 0 of several, reports.
    """
    from hmmlm.data.tokenfile import unknown_fraction
    from hmmlm.device import peak_memory, pick_device
    from hmmlm.distributed.ranks import connected
    from hmmlm.runs.commands import program
    from hmmlm.runs.progress import Progress, terminal_progress
    from hmmlm.training.prepare import reopen

    progress = Progress() if arguments.quiet else terminal_progress()
    with connected(pick_device(config.train.device).type == "cuda") as ranks, ExitStack() as stack:
        if ranks.first and config.data == "embedded" and "data" not in arguments.model_fields_set:
            progress.note("no --data: training on the embedded corpus, the documentation that comes with Python")
        if arguments.resume is not None:
            result = train(config, find_run(arguments.resume, command), True, progress)
        else:
            out = ranks.on_first(lambda: stack.enter_context(new_folder(arguments.out, FOLDERS[command], name)))
            result = train(config, out, False, progress)
    if not ranks.first:
        return result, False
    if result.finished:
        memory, data = peak_memory(pick_device(config.train.device)), reopen(result.out)
        unknown = unknown_fraction(data.tokens["valid"], data.tokenizer.unk_id, data.tokenizer.eos_id)
        steps = counted(result.steps, "step")
        print(
            f"finished after {steps}, {result.seconds:,.0f} s, {memory / 1e9:.2f} GB of memory; "
            f"best model, of valid perplexity {result.best_perplexity:.2f} ({unknown:.1%} unknown words): "
            f"{printable(str(result.out / 'best'))}"
        )
    else:
        again = f"{program()} {command} --resume {result.out}"
        print(f"stopped at step {result.steps:,}, saved; continue with: {printable(again)}")
    return result, True


def config_of(kind: type[TrainingConfig], arguments: TrainingConfig) -> Any:
    """Return the configuration part of arguments."""
    return kind(**{name: getattr(arguments, name) for name in kind.model_fields})
