"""Reference pages from the code itself: settings, commands and their options, errors and their exit codes."""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin
from unittest import mock

from shmstage import errors
from shmstage.cli import COMMANDS
from shmstage.launch.run_command import SECTIONS
from shmstage.settings import SWITCHES, Settings

HERE: Final = Path(__file__).parent


# --- settings -----------------------------------------------------------------------------------------------------


def settings() -> str:
    """A table per section; every field of `Settings` in the order of its declaration."""
    heading_of = {key: heading for heading, key in SECTIONS.items()}
    unknown = set(heading_of) - set(Settings.model_fields)
    if unknown:
        raise ValueError(f"run_command.SECTIONS names {sorted(unknown)}, which are no settings")
    lines: list[str] = []
    for key, field in Settings.model_fields.items():
        if key in heading_of:
            lines += ["", f"## {heading_of[key]}", "", "| setting | values | default | what it is |"]
            lines += ["|---|---|---|---|"]
        if key.endswith("_settings"):  # a table of the file
            continue
        table = f" Its own settings stand in the table `[{key}]`." if f"{key}_settings" in Settings.model_fields else ""
        lines.append(
            f'| <a id="{key}"></a>`{key}` | {_values(field.annotation, field.metadata)} | {_default(field.default)} '
            f"| {_cell(field.description or '')}.{table} |"
        )
    lines += ["", "## The three switches", "", "Another spelling of `boundary`.", ""]
    lines += ["| flag | variable | what it does |", "|---|---|---|"]
    lines += [f"| `--{_flag(key)}` | `${bare}` | {_cell(text)} |" for key, (bare, text) in SWITCHES.items()]
    return "\n".join(lines)


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _values(annotation: Any, metadata: list[Any]) -> str:
    found = list(dict.fromkeys(_kinds(annotation)))
    words = [name for name in found if name != "unset"]
    limits = {name: getattr(each, name) for each in _all_metadata(annotation, metadata)
              for name in ("ge", "gt", "le", "lt") if getattr(each, name, None) is not None}
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    text = " or ".join(words)
    if low is not None and high is not None:
        text += f", {'above ' if 'gt' in limits else ''}{low:g} to {_number(high)}"
    elif low is not None:
        text += f", {'above' if 'gt' in limits else 'from'} {low:g}"
    return text


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    is_power = value == 1 << power and power >= 10
    return f"2<sup>{power}</sup>" if is_power else f"{value:,.0f}"


def _all_metadata(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    for each in metadata:
        yield from getattr(each, "metadata", [each])
        yield each
    for inner in get_args(annotation):
        if get_origin(inner) is Annotated:
            for each in get_args(inner)[1:]:
                yield from getattr(each, "metadata", [each])


def _kinds(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield ", ".join(f"`{value}`" for value in get_args(annotation))
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_args(annotation):
        for inner in get_args(annotation):
            yield from _kinds(inner)
    else:
        names = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
        yield names.get(annotation, "unset")


def _default(value: Any) -> str:
    if value is None or value == "":
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# --- commands -----------------------------------------------------------------------------------------------------


class _Parsed(Exception):
    """Carries a command's parser out of it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def parser_of(command: str, *arguments: str) -> argparse.ArgumentParser:
    """The parser that a command makes, taken where it would parse."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Parsed(parser)

    module = importlib.import_module(COMMANDS[command][0])
    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            module.main(list(arguments))
        except _Parsed as parsed:
            return parsed.parser
    raise ValueError(f"shmstage {command} made no parser")


def subcommands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Name → parser; empty where a command has no actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """`run`, `bundle`, `bundle import`, ...: every command and each of its actions."""
    found: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        parser = found[command] = parser_of(command)
        for name, inner in subcommands_of(parser).items():
            found[f"{command} {name}"] = inner
    if "bundle record" in found:  # its own module parses: see `bundle_cli`
        found["bundle record"] = parser_of("bundle", "record")
    return found


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Without --help and what is not shown."""
    kept = (a for a in parser._actions if a.help is not argparse.SUPPRESS and a.dest != "help")
    return [a for a in kept if not isinstance(a, argparse._SubParsersAction)]


def commands() -> str:
    """A section per command; options that are settings stand once, in the settings' page."""
    of_settings = {option for action in options_of(parser_of("run")) for option in action.option_strings
                   if action.dest in Settings.model_fields or action.dest in SWITCHES}
    lines: list[str] = []
    for name, parser in all_parsers().items():
        lines += ["", f"## shmstage {name}", "", _paragraphs(parser.description or "")]
        options = options_of(parser)
        own = [a for a in options if not set(a.option_strings) & of_settings]
        if len(own) < len(options):
            lines += ["", "Every [setting](settings.md) is an option as well.", ""]
        if own:
            lines += ["", "| argument | what it is |", "|---|---|"]
            lines += [f"| {_spelled(action)} | {_cell(_help(action, parser))} |" for action in own]
    return "\n".join(lines)


def _paragraphs(text: str) -> str:
    """Tables made with spaces stay as they are, the rest is text."""
    parts = re.split(r"\n\s*\n", text)
    return "\n\n".join(f"<pre>{_cell(part)}</pre>" if re.search(r"\S {2,}\S", part) else part for part in parts)


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`" + ("" if action.required else ", may be left out")
    shown = action.metavar if isinstance(action.metavar, str) else None
    if shown is None and action.nargs != 0:
        shown = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    value = f" {shown}" if shown and action.nargs != 0 else ""
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return (action.help or "") % {"default": action.default, "prog": parser.prog, "dest": action.dest}


# --- errors -------------------------------------------------------------------------------------------------------


def exit_codes() -> str:
    """Exit code → classes, from the classes themselves."""
    by_code: dict[int, list[str]] = {}
    for name, cls in sorted(errors.by_name().items()):
        by_code.setdefault(cls.exit_code, []).append(f"[`{name}`](#{name.lower()})")
    return "\n".join(f"- **{code}**: {', '.join(names)}" for code, names in sorted(by_code.items()))


def error_classes() -> str:
    """A section per class: what it means (its docstring), its exit code, what to do (`remedies.toml`)."""
    remedies = tomllib.loads((HERE / "remedies.toml").read_text())
    known = errors.by_name()
    if set(remedies) != set(known):
        raise ValueError(f"docs/hooks/remedies.toml and shmstage.errors differ in {sorted(set(remedies) ^ set(known))}")
    lines: list[str] = []
    for name, cls in known.items():
        meaning = " ".join(str(cls.__doc__).split()).replace("``", "`")
        parent = cls.__mro__[1].__name__
        kind = f", a `{parent}`" if parent in known else ""
        lines += ["", f"## {name}", "", f"Exit code {cls.exit_code}{kind}. {meaning}", "", remedies[name].strip()]
    return "\n".join(lines)
