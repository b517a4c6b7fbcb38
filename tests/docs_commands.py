"""Whether a line of shell in the documentation is one that its command takes. Nothing is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from unittest import mock

import docs_reference

from shmstage.cli import COMMANDS
from shmstage.errors import ShmstageError
from shmstage.launch.run_command import resolve_args
from shmstage.settings import resolve

ROOT: Final = Path(__file__).parents[1]
#: what the documentation may use of other programs: option → whether it takes a value
OPTIONS: Final[Mapping[str, Mapping[str, bool]]] = {
    "docker": {"--shm-size": True, "--memory": True, "--ipc": True},
    "pip": {},
    "python": {"-c": True, "-m": True},
}
#: words of the shell, and programs that are called with nothing worth a check
SHELL: Final = {"cd", ".", "source", "test", "true", "false", "wait", "echo", "export"}
OPERATORS: Final = {";", "&", "&&", "|", "||", "(", ")"}
#: what an upper-case word stands for
STANDS_FOR: Final = {
    "HEAD:6379": "10.0.0.1:6379", "DIR": "some-directory", "OUT": "some-out", "RUN": "some-run", "N": "3",
    "FILE": "file.jsonl", "FILE.jsonl": "file.jsonl",
}  # fmt: skip


class WrongCommand(Exception):
    """With the reason."""


def calls_in(script: str) -> Iterator[list[str]]:
    """The commands of a script, each as its words; redirections are left out."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        tokens = iter(list(lexer))
        for token in tokens:
            if token in OPERATORS:
                if words:
                    yield words
                words = []
            elif set(token) <= set("<>&") and token:
                next(tokens, None)  # where it goes
                if words and words[-1].isdigit():
                    words.pop()
            else:
                words.append(token)
        if words:
            yield words


def check(words: list[str], files: Mapping[str, str], script_flags: str | None = None) -> None:
    """Raises ``WrongCommand``. ``files``: name → text of the files that the page has made by then."""
    name, *arguments = words
    if name == "shmstage":
        _check_shmstage(arguments, files)
    elif name == "make":
        _check_make(arguments)
    elif name == "pip":
        _check_pip(arguments)
    elif name == "python":
        _check_python(arguments, files)
    elif name == "docker":
        _check_docker(arguments, files)
    elif name not in SHELL:
        raise WrongCommand(f"{name}: no program that the documentation may use")


def _check_shmstage(arguments: list[str], files: Mapping[str, str]) -> None:
    if not arguments or arguments[0] in ("--help", "--version"):
        return
    command, *rest = (STANDS_FOR.get(word, word) for word in arguments)
    if command not in COMMANDS:
        raise WrongCommand(f"shmstage {command}: no such command")
    if "--help" in rest:
        return
    parser = docs_reference.parser_of(command, *(rest[:1] if rest[:1] == ["record"] else ()))
    if command == "bundle" and rest[:1] == ["record"]:
        rest = rest[1:]
    try:
        with mock.patch.object(type(parser), "error", _refuse), mock.patch.object(parser, "error", _refuse_here):
            parsed = parser.parse_args(rest)
        if getattr(parsed, "config", None) is not None:
            if str(parsed.config) not in files:
                raise WrongCommand(f"--config {parsed.config}: no block of the page is that file")
            parsed.config = _written(files[str(parsed.config)])
        if hasattr(parsed, "resume") and not isinstance(parsed.resume, str):
            resolve_args(parsed)
    except ShmstageError as error:
        raise WrongCommand(f"shmstage {' '.join(arguments)}: {error}") from error


def _refuse(parser: object, message: str) -> None:
    raise WrongCommand(message)


def _refuse_here(message: str) -> None:
    raise WrongCommand(message)


def _written(text: str) -> Path:
    """A file for what reads files; ``check`` runs in a directory of the test's own."""
    path = Path("given.toml")
    path.write_text(text)
    return path


def _check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in arguments:
        if target not in targets:
            raise WrongCommand(f"make {target}: the Makefile has {', '.join(sorted(targets))}")


def _check_pip(arguments: list[str]) -> None:
    editable = arguments[1:2] == ["-e"]
    if arguments[:1] != ["install"] or len(arguments) != 2 + editable:
        raise WrongCommand(f"pip {' '.join(arguments)}: only `pip install [-e] '.[EXTRA]'` or 'shmstage[EXTRA]'")
    found = re.fullmatch(rf"(?:\.{'' if editable else '|shmstage'})(?:\[([\w,]+)\])?", arguments[-1])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if found is None or not set((found[1] or next(iter(extras))).split(",")) <= set(extras):
        raise WrongCommand(f"pip install {arguments[-1]}: the extras are {', '.join(extras)}")


def _check_python(arguments: list[str], files: Mapping[str, str]) -> None:
    if arguments[:1] == ["-m"]:
        arguments = arguments[2:]
        return
    if arguments[:1] == ["setup.py"]:
        return
    path, *options = arguments
    if path in files:
        return
    if not (ROOT / path).is_file():
        raise WrongCommand(f"python {path}: no such file")
    said = "".join(file.read_text() for file in (ROOT / path).parent.glob("*.py"))
    for option in options:
        if option.startswith("--") and f'"{option}"' not in said:
            raise WrongCommand(f"python {path} {option}: it has no such option")


def _check_docker(arguments: list[str], files: Mapping[str, str]) -> None:
    if arguments[:1] != ["run"]:
        raise WrongCommand("docker: only `docker run` is used")
    rest = arguments[1:]
    while rest and rest[0].startswith("-"):
        if rest.pop(0).partition("=")[0] not in OPTIONS["docker"]:
            raise WrongCommand("docker run: an option that is not known here")
    if rest[1:]:  # behind the image
        check(rest[1:], files)


def check_settings(text: str) -> None:
    """A TOML block is a settings file; raises ``WrongCommand``."""
    try:
        resolve({}, {}, _written(text))
    except ShmstageError as error:
        raise WrongCommand(str(error)) from error
