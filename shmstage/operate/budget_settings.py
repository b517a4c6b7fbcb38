"""What only ``shmstage budget`` is told: its flags, the table ``[budget]`` of the TOML file, and which was taken."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from shmstage.budget.fields import MANDATORY_WORDS
from shmstage.budget.formula import MAX_LEAVES, Platform
from shmstage.errors import SettingsError, named, shown
from shmstage.settings import Settings

#: bytes of one number
PARAM_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
NUMBERS = ("layers", "top_k", "word_fields", "param_leaves", "hosts")
SIZES = ("param_bytes", "optimizer_bytes", "process_bytes", "device_memory")
CHOICES = {"platform": get_args(Platform), "param_dtype": tuple(PARAM_DTYPES)}
KEYS = (*NUMBERS, *SIZES, *CHOICES, "fill", "replay", "limit")


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per key of the table ``[budget]``; unset ones stay ``None``."""
    group = parser.add_argument_group("what the settings do not say (in the TOML file: the table [budget])")
    size = "bytes, or with a unit: 10GB, 64MiB"
    group.add_argument("--layers", type=int, metavar="N", help="layers whose routing is carried; unset: no routing")
    group.add_argument("--top-k", type=int, metavar="N", help="experts per token and layer")
    group.add_argument("--fill", metavar="PART", help="real tokens / (rows x tokens), above 0 to 1 (default 1)")
    group.add_argument(
        "--word-fields", type=int, metavar="N", help=f"4-byte fields per token (default {MANDATORY_WORDS} or as needed)"
    )
    group.add_argument("--param-bytes", metavar="SIZE", help=f"parameters on one host, {size}")
    group.add_argument(
        "--param-dtype", choices=CHOICES["param_dtype"], help="of the parameters; sums are float32 (default float32)"
    )
    group.add_argument(
        "--param-leaves", type=int, metavar="N",
        help=f"arrays that the parameters are; weight_sync publishes {MAX_LEAVES} at most, each padded",
    )  # fmt: skip
    group.add_argument("--optimizer-bytes", metavar="SIZE", help="optimizer state (default: twice the parameters)")
    group.add_argument(
        "--process-bytes", metavar="SIZE", help=f"all processes of the run before they hold anything, {size}"
    )
    group.add_argument("--platform", choices=CHOICES["platform"], help="where the trainer computes (default: as here)")
    group.add_argument("--hosts", type=int, metavar="N", help="hosts that share the rows (default 1)")
    group.add_argument(
        "--replay", action="store_true", default=None, help="the engine replays micro-batches that overflowed"
    )
    group.add_argument("--device-memory", metavar="SIZE", help=f"memory of one host's devices together, {size}")
    group.add_argument(
        "--limit", action="append", metavar="[KIND=]SIZE",
        help="instead of all limits found here, or of those of one kind: mount=, cgroup= or ram=; can be repeated",
    )  # fmt: skip


def take_table(args: argparse.Namespace, table: Mapping[str, Any] | None, file: Path | None) -> None:
    """Put the table's values where no flag is, as if they had been flags. ``args.spelled`` then says for each value
    that was given what an error, and ``--explain``, should call it.

    Raises ``SettingsError`` for an unknown key or a value of another kind.
    """
    args.spelled = {key: "--" + key.replace("_", "-") for key in KEYS if getattr(args, key) is not None}
    for key, value in (table or {}).items():
        taken = _checked(key, value, f"[budget] of {file}")
        if key not in args.spelled:
            setattr(args, key, taken)
            args.spelled[key] = f"file {file}"


def name_of(args: argparse.Namespace, key: str) -> str:
    """What an error calls a value: the flag, or the key and its file."""
    spelled: str = args.spelled[key]
    return spelled if spelled.startswith("--") else f"{key} ({spelled})"


def _checked(key: str, value: object, where: str) -> object:
    """The value as the flag would have given it."""
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1)
        if key in Settings.model_fields:
            hint = "it is a setting of the run: write it above the tables"
        else:
            hint = f"did you mean {near[0]}?" if near else "`shmstage budget --help` lists all of them"
        raise SettingsError(f"unknown key {named(key)} = {shown(value)} in {where}; {hint}")
    kind = type(value)
    if key in NUMBERS and kind is not int:
        raise SettingsError(f"{key} = {shown(value)} in {where} must be a whole number")
    if key in SIZES and kind not in (int, str):
        raise SettingsError(f'{key} = {shown(value)} in {where} must be bytes, or a text as "10GB"')
    if key in CHOICES and value not in CHOICES[key]:
        raise SettingsError(f"{key} = {shown(value)} in {where} must be one of {', '.join(CHOICES[key])}")
    if key == "replay" and kind is not bool:
        raise SettingsError(f"replay = {shown(value)} in {where} must be true or false")
    if key == "fill" and kind not in (int, float, str):
        raise SettingsError(f"fill = {shown(value)} in {where} must be a number above 0, up to 1")
    if key == "limit":
        limits = value if isinstance(value, list) else [value]
        if not all(type(each) in (int, str) for each in limits):
            raise SettingsError(f'limit = {shown(value)} in {where} must be a size, "mount=SIZE", or a list of such')
        return [_as_text(each) for each in limits]
    return _as_text(value) if key in SIZES or key == "fill" else value


def _as_text(value: object) -> str:
    """A number of the file as the text a flag would have been. TOML's integers may be of any length."""
    if isinstance(value, int) and value.bit_length() > 64:
        raise SettingsError(f"{shown(value)} is no size; give less than 2**63 bytes")
    return str(value)
