"""Command lines into typed arguments, by pydantic-settings; every mistake becomes an InputError of one line."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from hmmlm.config.explain import explain, member_types
from hmmlm.errors import InputError
from hmmlm.runs.folders import find_run
from hmmlm.section import MAX_THREADS
from hmmlm.terminal import help_width, wrap_help

AnyArguments = TypeVar("AnyArguments", bound="Arguments")
ModelPath = Annotated[
    CliPositionalArg[Path],
    Field(description="A saved model, the folder of a training run (its best model), or `latest`: the newest run."),
    AfterValidator(find_run),
]


class Arguments(BaseSettings):
    """The arguments of a command; the docstring under a field is its help text."""

    none_word: ClassVar[str] = "null"
    """The value that means None; not "None", which a text may contain."""
    sources: ClassVar[tuple[type[PydanticBaseSettingsSource], ...]] = ()
    """Where values that the command line leaves out come from."""
    threads: Annotated[int, Field(gt=0, le=MAX_THREADS)] | None = None
    """CPU threads; None: one per core."""
    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_empty_paths(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse the value of an unset shell variable, which would mean this folder, or no text at all."""
        for name, value in values.items():
            field = cls.model_fields.get(name)
            if value == "" and field is not None and (name == "data" or "Path" in str(field.annotation)):
                raise ValueError(f"{name.replace('_', '-')} is empty: give a file or a folder")
        return values

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the command line and the sources of the class: no environment variables, no .env files."""
        return init_settings, *(source(settings_cls) for source in cls.sources)


class Parser(argparse.ArgumentParser):
    """Raises errors instead of exiting, and prints help by section."""

    def __init__(self, **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **options)
        self.add_argument("-h", "--help", nargs="?", const="", action=_Help, help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and unknown.startswith("-"):
            message = _unknown_option(unknown.split()[0].partition("=")[0], self._option_string_actions)
        elif unknown != message:
            hint = "; did you mean --data?" if "--data" in self._option_string_actions else ""
            message = f"unexpected argument {(unknown.split() or [''])[0]!r}{hint}"
        raise InputError(f"{message}; see {self.prog} --help")

    def format_section(self, name: str) -> str:
        """Return the help of one section of options; "all": of all of them."""
        groups = {str(group.title).removesuffix(" options"): group for group in self._action_groups[2:]}
        if name != "all" and name not in groups:
            raise InputError(f"no section {name!r} of options; sections: {', '.join(groups)}, all")
        formatter = self._get_formatter()
        for title, group in groups.items():
            if name in ("all", title):
                formatter.start_section(group.title)
                if "(undefined)" not in str(group.description):  # of a section inside a union
                    formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return formatter.format_help()


def known_options(command: str) -> list[str] | None:
    """Return the options of a command whose configuration, and so whose parser, imports torch; None for others."""
    known: dict[str, list[str]] = json.loads(resources.files("hmmlm.cli").joinpath("options.json").read_text())
    return known.get(command)


def check_options(command: str, argv: Sequence[str]) -> None:
    """Raise an InputError for an option that a command of `known_options` does not have."""
    known = known_options(command) or []
    for argument in takewhile(lambda argument: argument != "--", argv if known else ()):
        option = argument.partition("=")[0]
        if option.startswith("--") and " " not in option and option not in known:
            raise InputError(f"{_unknown_option(option, known)}; see hmmlm {command} --help")


def _unknown_option(option: str, known: Iterable[str]) -> str:
    ending = [other for other in known if other.rpartition(".")[2].endswith(option.lstrip("-"))]
    near = ending or difflib.get_close_matches(option, known, n=1)
    return f"unknown option {option}" + (f"; did you mean {near[0]}?" if near else "")


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option_string: str | None = None
    ) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_section(values) if values else parser.format_help(), end="")
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap_help(super()._fill_text(text, width, indent))


class _Options:
    """What options need beyond pydantic-settings: repetition, and help that names kinds and their own defaults."""

    def __init__(self, kind: type[BaseModel], defaults: BaseModel | None) -> None:
        self.repeatable = {name for name, field in kind.model_fields.items() if ... in get_args(field.annotation)}
        self.internal = {name for name, field in kind.model_fields.items() if argparse.SUPPRESS in field.metadata}
        self.sections = {name for name, field in kind.model_fields.items() if member_types(field)}
        self.notes: dict[str, str] = {}
        for section, field in kind.model_fields.items():
            default, members = getattr(defaults, section, field.default), member_types(field)
            for name in dict.fromkeys(name for member in members for name in member.model_fields):
                owners = [member for member in members if name in member.model_fields]
                note = _default_note(name, owners, getattr(default, name, PydanticUndefined))
                if len(owners) < len(members):
                    note = f"{', '.join(owner.model_fields['kind'].default for owner in owners)}; {note}"
                self.notes[f"{section}.{name}"] = f"({note})"

    def add(self, group: argparse._ActionsContainer, *names: str, **options: Any) -> argparse.Action:
        """Add an option to a group."""
        name = str(options.get("dest"))
        if name in self.internal:
            return argparse.Action([], name)
        if name in self.sections:  # a whole section as JSON: without a value it would change nothing
            options.pop("nargs", None)
            options.pop("const", None)
        if name in self.repeatable:
            options["action"] = "append"
        if names[0] in self.repeatable:  # positional
            options["nargs"] = "+"
        text = options.get("help", "")
        if name in self.notes and text != argparse.SUPPRESS:  # pydantic-settings shows the default of another kind
            text = re.sub(r"\((default|ifdef): .*\)$", "", text, flags=re.DOTALL)
            options["help"] = text + self.notes[name].replace("%", "%%")
        return group.add_argument(*names, **options)

    def parse(self, parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
        """Parse a command line; the values of repeatable options become JSON, as pydantic-settings reads it."""
        parsed = parser.parse_args(argv)
        for name in self.repeatable & vars(parsed).keys():
            setattr(parsed, name, json.dumps(getattr(parsed, name)))
        return parsed


def _default_note(name: str, owners: Sequence[type[BaseModel]], value: Any) -> str:
    """Return the default of a field of the kinds that have it, given the one in use (undefined if there is none)."""
    first = owners[0].model_fields[name].default
    if value is PydanticUndefined:
        value = first
    if value is PydanticUndefined:
        return "required"
    others: dict[str, list[str]] = {}
    for owner in owners:
        if name != "kind" and owner.model_fields[name].default != first:
            others.setdefault(_text(owner.model_fields[name].default), []).append(owner.model_fields["kind"].default)
    return "; ".join([f"default: {_text(value)}", *(f"{', '.join(k)}: {text}" for text, k in others.items())])


def _text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return json.dumps(value, separators=(",", ":")) if isinstance(value, tuple) else str(value)


def parse(
    kind: type[AnyArguments],
    argv: list[str],
    command: str,
    description: str,
    shortcuts: Mapping[str, str] | None = None,
    defaults: BaseModel | None = None,
) -> AnyArguments:
    """Return the arguments of a command line. Help is printed and exits.

    Args:
        defaults: a configuration whose values the help shows as defaults; None: those of the fields.
    """
    options = _Options(kind, defaults)
    usage = " ".join(["hmmlm", command, *_positionals(kind, options.repeatable), "[OPTIONS]"])
    parser = Parser(prog=f"hmmlm {command}", description=description, usage=usage, formatter_class=_Formatter)
    try:
        source = CliSettingsSource[Any](
            kind,
            root_parser=parser,
            parse_args_method=options.parse,
            add_argument_method=options.add,
            cli_parse_args=argv,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            cli_parse_none_str=kind.none_word,
            cli_shortcuts=shortcuts,
        )
        arguments = kind(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValidationError as error:
        raise InputError(f"{explain(kind, error, _option)}; see hmmlm {command} --help") from None
    except SettingsError as error:
        raise InputError(f"{_unreadable(argv, error)}; see hmmlm {command} --help") from None
    except RecursionError:
        raise InputError(f"a value is nested too deeply; see hmmlm {command} --help") from None
    if arguments.threads is not None:
        from hmmlm.device import set_threads

        set_threads(arguments.threads)
    return arguments


def _positionals(kind: type[BaseModel], repeatable: Set[str]) -> list[str]:
    """Return the positional arguments of a command, as its usage shows them."""
    marker = get_args(CliPositionalArg[str])[1]
    fields = {name: field for name, field in kind.model_fields.items() if marker in field.metadata}
    names = {name: name.upper() + ("..." if name in repeatable else "") for name in fields}
    return [names[name] if field.is_required() else f"[{names[name]}]" for name, field in fields.items()]


def _unreadable(argv: list[str], error: SettingsError) -> str:
    """Return which option has a value that is not JSON, though its field is a list."""
    value = getattr(error.__cause__, "doc", None)
    for option, given in zip(["", *argv], argv, strict=False):
        if value is not None and given in (value, f"{given.partition('=')[0]}={value}"):
            return f"{option if given == value else given.partition('=')[0]}: write a list as [1,2] (given {value!r})"
    return str(error)


def _option(path: str) -> str:
    """Return the option of a field: model.exchange_passes is --model.exchange-passes."""
    return f"--{path.replace('_', '-')}"
