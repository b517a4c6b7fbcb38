"""Builds the extension of a copy again when a mutant lies in ``native/``."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotBuiltError(Exception):
    """The compiler's words."""


FLAGS = ("-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-pthread")


@contextmanager
def rebuild(where: Path, mutated: Path) -> Iterator[None]:
    """Inside it ``shmstage._native`` is built from the copy's sources if ``mutated`` is one of them."""
    if mutated.suffix != ".cpp":
        yield
        return
    (extension,) = (where / "shmstage").glob("_native*.so")
    kept = where / "kept.so"
    shutil.copy(extension, kept)
    try:
        sources = sorted((where / "native").glob("*.cpp"))
        objects = [_compiled(source, where, again=source == mutated) for source in sources]
        _run(["c++", "-shared", "-pthread", *map(str, objects), "-o", str(extension)])
        yield
    finally:
        shutil.copy(kept, extension)


def _compiled(source: Path, where: Path, *, again: bool) -> Path:
    """The object of one source; what was not mutated is compiled once per copy."""
    try:
        import pybind11
    except ModuleNotFoundError as error:
        raise NotBuiltError("pybind11 is missing; pip install pybind11") from error
    made = where / f"{source.stem}{'.mutated' if again else ''}.o"
    if again or not made.exists():
        includes = [str(where / "native"), sysconfig.get_path("include"), pybind11.get_include()]
        _run(["c++", *FLAGS, *(f"-I{path}" for path in includes), "-c", str(source), "-o", str(made)])
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise NotBuiltError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
