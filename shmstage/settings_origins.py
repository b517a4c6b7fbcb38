"""What settings are read from, a TOML file and the environment; the values are checked in ``settings``."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmstage.errors import SettingsError, named, shown
from shmstage.tables import MAX_TABLE_DEPTH

#: not settings of their own: tables of the file
TABLES = {"engine_settings": "engine", "source_settings": "source", "hooks_settings": "hooks"}

FILE_LIMIT_NBYTES = 1 << 20
#: tomllib takes the square of the number of a key's parts: minutes for a file of 40 kB
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?>(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_TABLE_DEPTH + 1}}}""", re.ASCII
)

#: begin like a setting's variable, and are for our build and our tests
OTHER_VARIABLES = ("SHMSTAGE_SANITIZE", "SHMSTAGE_WALK_SEED", "SHMSTAGE_FUZZ_SEED", "SHMSTAGE_FUZZ_EXAMPLES")
#: NAME=value by which Kubernetes tells every pod of a Service "shmstage" or "shmstage-x"
_SERVICE_LINK = re.compile(r"SHMSTAGE_(\w+_)?(SERVICE_HOST=|SERVICE_PORT\w*=|PORT_\d+_[A-Z]+\w*=|PORT=[a-z]+://)")


def read_settings_file(file: Path) -> dict[str, Any]:
    """Key → value, each of ``TABLES`` under its setting's name. Raises ``SettingsError``."""
    try:
        with file.open("rb") as opened:  # may be a pipe: --config <(...)
            text = opened.read(FILE_LIMIT_NBYTES + 1)
        if len(text) > FILE_LIMIT_NBYTES:
            raise SettingsError(f"settings file {file} is longer than {FILE_LIMIT_NBYTES} bytes; is it the right one?")
        whole = text.decode()
        if found := _LONG_KEY.search(whole):
            raise SettingsError(
                f"settings file {file}: the key {shown(found[0], 40)} has more than {MAX_TABLE_DEPTH} parts; flatten it"
            )
        raw = tomllib.loads(whole)
    except OSError as error:
        raise SettingsError(f"settings file {file}: {error.strerror}; check the path") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, numbers or nesting beyond any use
        raise SettingsError(f"settings file {file} is not valid TOML: {error}") from None
    for table, key in TABLES.items():
        if table in raw:
            raise SettingsError(f"{table} in {file}: write it as the table [{key}]")
        if isinstance(raw.get(key), dict):
            # TOML cannot hold both `engine = "m:f"` and `[engine]`; inside the table the name is `factory`
            inner = dict(raw.pop(key))
            if "factory" in inner:
                raw[key] = inner.pop("factory")
            raw[table] = inner
    return raw


def check_variables(environment: Mapping[str, str], variables: Mapping[str, Sequence[str]]) -> None:
    """Raises ``SettingsError`` for a misspelt variable; ``variables``: setting → its variables."""
    known = {*OTHER_VARIABLES, *(spelled for names in variables.values() for spelled in names)}
    for name, value in environment.items():
        if name.startswith("SHMSTAGE_") and name not in known and not _SERVICE_LINK.match(f"{name}={value}"):
            near = difflib.get_close_matches(name.removeprefix("SHMSTAGE_").lower(), variables, n=1)
            hint = f"did you mean SHMSTAGE_{near[0].upper()}?" if near else "no setting is called so; unset it"
            raise SettingsError(f"unknown variable ${named(name)}; {hint}")
