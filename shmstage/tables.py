"""Texts and tables that somebody gives: they go into file names and error lines, and to other processes as JSON."""

from __future__ import annotations

import math
import re

from shmstage.errors import SettingsError, named, shown

MAX_TEXT_CHARACTERS = 4096
#: tables of the file are handed on as JSON
MAX_TABLE_DEPTH = 32
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def _is_text(value: str) -> bool:
    # what cannot be encoded came in bytes from the environment or the command line, and could not be handed on as JSON
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_line(value: str) -> bool:
    # it goes into file names, logs and error texts; control characters are below 32 and from 127 to 159
    return _is_text(value) and len(value) <= MAX_TEXT_CHARACTERS and not _CONTROL.search(value)


def check_table(where: str, value: object, depth: int = MAX_TABLE_DEPTH) -> None:
    """Plug-ins get their settings in another process: they must arrive there as they are here."""
    kind = type(value)
    if value is None or kind is bool or (kind is str and _is_text(str(value))):
        return
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return
        raise SettingsError(f"[{where}] = {shown(value)}: integers have 64 bits; write it as a string")
    if isinstance(value, float):
        if math.isfinite(value):
            return
        raise SettingsError(f"[{where}] = {value}: it cannot be handed on as JSON; write it as a string")
    if kind is not dict and kind is not list:
        raise SettingsError(f"[{where}] = {shown(value)} ({kind.__name__}) cannot be handed on; write it as a string")
    if not depth:
        raise SettingsError(f"[{where[:200]}]: tables nest deeper than {MAX_TABLE_DEPTH} levels; flatten them")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):  # type: ignore[arg-type]
        check_table(f"{where}.{named(str(key))}", item, depth - 1)
