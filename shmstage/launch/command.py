"""What every command has in common: one line for bad arguments, one object for whoever reads JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import NoReturn

from shmstage.errors import SettingsError, ShmstageError, named


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong with its arguments as every other bad input is said: in one line."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{named(message, 1000)}; `{self.prog} --help` lists all options")


@contextlib.contextmanager
def json_on_failure(as_json: bool) -> Iterator[None]:
    """Whoever reads one object from stdout gets one, however it ended."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if as_json:
            code = error.exit_code if isinstance(error, ShmstageError) else 1
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, KeyboardInterrupt):
                code, text = 130, "interrupted"
            print(json.dumps({"error": {"kind": type(error).__name__, "text": text, "exit_code": code}}), flush=True)
        raise
