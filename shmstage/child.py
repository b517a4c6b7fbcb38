"""What every child process of the launcher has in common: its settings, when it stops, how it says why it failed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import final

from shmstage.errors import SettingsError, ShmstageError
from shmstage.records import parse_record, read_json, write_failure
from shmstage.settings import Settings

#: a thread that is woken waits no longer for one that computes: with Python's own 5 ms the update of an engine that
#: reads overflow flags on the host is dispatched half as late again
SWITCH_INTERVAL_S = 0.0005


@final
class Lifeline:
    """``stop_requested`` turns true on SIGINT, SIGTERM or, with ``watch_stdin``, at the end of standard input.

    The launcher keeps the writing end of each child's standard input and never writes: the kernel closes it however
    the launcher ends, so a child outlives it by no more than one poll, or, if it hangs in somebody's plug-in, by twice
    ``grace_s``: then it is ended the hard way, for nobody else is left to do it.
    """

    def __init__(self, *, watch_stdin: bool, grace_s: float = 20.0) -> None:
        self._stop = threading.Event()
        self._grace_s = grace_s
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if watch_stdin:
            threading.Thread(target=self._wait_for_end, name="lifeline", daemon=True).start()

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def exit_at_once(self) -> None:
        """From now on a stop ends the process without ceremony: for a child that holds nothing others wait for."""
        threading.Thread(target=self._exit_when_stopped, name="exit-at-once", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def _wait_for_end(self) -> None:
        while os.read(0, 4096):
            pass
        self._stop.set()
        # twice: the launcher, should it live, waits once before it kills
        threading.Event().wait(2 * self._grace_s)
        print("the launcher is gone and this process did not stop in time: ended the hard way", flush=True)
        os._exit(130)

    def _exit_when_stopped(self) -> None:
        self._stop.wait()
        os._exit(130)


def run_child(
    role: str,
    serve: Callable[[Settings, Lifeline, int, Path | None], None],
    records_in: Callable[[Settings, Path | None], Path] = lambda settings, peers_file: settings.out_dir,
) -> int:
    """Parse the child's arguments, call ``serve(settings, lifeline, epoch, peers_file)``, return the exit code.

    ``peers_file`` says who is where in a run past one machine, and with which keys; ``None`` on one. An error is one
    line (a traceback only if it is none of ours) in the log and a record for the launcher, in OUT or where
    ``records_in`` says.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(prog=f"python -m shmstage.{role}")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--settings", help="the settings as JSON, at most 128 kB: the kernel's limit for one argument")
    given.add_argument("--settings-file", type=Path, metavar="FILE", help="a run.json; its settings are taken")
    parser.add_argument("--epoch", type=int, default=1, help="incarnation of the orchestrator")
    parser.add_argument("--lifeline", action="store_true", help="stop at the end of standard input")
    parser.add_argument("--peers-file", type=Path, metavar="FILE", help="addresses and keys of the other hosts")
    args = parser.parse_args()
    try:
        settings = _settings(args)
    except SettingsError as error:  # without settings there is no OUT to leave a record in
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    lifeline = Lifeline(watch_stdin=args.lifeline, grace_s=settings.stop_grace_s)
    try:
        serve(settings, lifeline, args.epoch, args.peers_file)
        return 0
    except ShmstageError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return _write_failure(records_in, settings, args.peers_file, role, error)
    except BaseException as error:  # a plug-in may raise anything, SystemExit too
        traceback.print_exc()
        return _write_failure(records_in, settings, args.peers_file, role, error)


def _write_failure(
    records_in: Callable[[Settings, Path | None], Path],
    settings: Settings,
    peers_file: Path | None,
    role: str,
    error: BaseException,
) -> int:
    directory = settings.out_dir
    with suppress(ShmstageError):  # the file that says where may be what is wrong
        directory = records_in(settings, peers_file)
    return write_failure(directory, role, error)


def _settings(args: argparse.Namespace) -> Settings:
    try:
        if args.settings is not None:
            return Settings.model_validate(parse_record(args.settings.encode(errors="surrogateescape")))
        return Settings.model_validate(read_json(args.settings_file).get("settings"))
    except OSError as error:
        raise SettingsError(f"{args.settings_file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # pydantic's own among them
        reason = " ".join(str(error).split())[:300]
        raise SettingsError(f"the settings are not what a launcher writes: {reason}") from None
