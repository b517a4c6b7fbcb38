"""``shmstage``: finds the command and imports only what that command needs."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

#: command → (module with ``main(argv) -> exit code``, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("shmstage.launch.run_command", "train on this host (demo bundle if no input is named)"),
    "launch": ("shmstage.launch.launch_command", "train on several hosts of a Ray cluster"),
    "compare": ("shmstage.testing.compare", "run all boundary modes and the reference loop, check that they are equal"),
    "bundle": ("shmstage.packing.bundle_cli", "import, record, show or verify frozen trajectories"),
    "budget": ("shmstage.operate.budget_command", "what a run would need, in bytes, and whether it fits"),
    "status": ("shmstage.operate.status_command", "show a run's processes, pools, slots and progress, dead or alive"),
    "report": ("shmstage.operate.report_command", "one HTML page: boundary idle, lanes to scale, where the idle went"),
    "gc": ("shmstage.operate.gc_command", "remove pools whose owner is provably dead"),
    "doctor": ("shmstage.operate.doctor_command", "check this machine for what makes shared memory fail"),
}

HELP = """usage: shmstage COMMAND [options]

Joins the orchestrator and the trainer of reinforcement learning on JAX through shared memory.

commands:
{commands}

`shmstage COMMAND --help` says more. `shmstage --version` prints the version.
Exit codes: 0 ok · 1 negative verdict · 2 bad input · 3 limit unreadable · 4 under headroom · 5 training failed ·
6 peer lost · 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of ours are one line on stderr, never a traceback."""
    _mend_standard_streams()
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has had enough, as with `| head`
        _write_no_more()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        _write_no_more()
        print(f"shmstage: cannot write: {error.strerror}; free space where the output goes", file=sys.stderr)
        return 2


def _mend_standard_streams() -> None:
    for number in range(3):  # one that is closed would be the number of the next file opened, and be printed into
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (it lives as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115 (it lives as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal can show every letter
            stream.reconfigure(errors="backslashreplace")


def _write_no_more() -> None:
    """What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(len(name) for name in COMMANDS)
        print(HELP.format(commands="\n".join(f"  {n:<{width}}  {text}" for n, (_, text) in COMMANDS.items())))
        return 0
    if arguments[0] == "--version":
        from shmstage import __version__

        print(f"shmstage {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"shmstage: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    from shmstage.errors import ShmstageError

    try:
        code: int = importlib.import_module(COMMANDS[name][0]).main(arguments[1:])
        return code
    except ShmstageError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
