"""Every exception of shmstage. The class says what the caller can do; the text carries value, limit and remedy."""

from __future__ import annotations

from collections.abc import Iterator


class ShmstageError(Exception):
    """Base of all errors that cross the public API.

    ``exit_code`` is what the command line exits with: 2 bad input, 3 limit unreadable, 5 training failed,
    6 peer lost.
    """

    exit_code = 5
    #: True if it was raised in the peer and came back as its answer
    from_peer = False


# --- bad input: correct it and call again -----------------------------------------------------------------


class InputError(ShmstageError):
    """Something the caller gave is wrong; nothing was changed."""

    exit_code = 2


class SettingsError(InputError):
    """A setting is unknown, malformed or contradicts another one."""


class BudgetError(InputError):
    """What was asked for does not fit into the limit that binds."""


class LayoutError(InputError):
    """A field's name, dtype, shape or memory order cannot be laid out in a slot."""


class TrajectoryError(InputError):
    """A trajectory is malformed or does not fit; names trajectory, field, want and got."""


class BundleError(InputError):
    """A bundle on disk is incomplete, altered or malformed."""


class PluginError(InputError):
    """An engine, source or hook named as ``module:factory`` cannot be used."""


class MissingExtraError(InputError):
    """An optional dependency is not installed; the text names the install command."""


class LimitUnreadableError(ShmstageError):
    """A memory limit exists but cannot be read; guessing it could get the process killed."""

    exit_code = 3


# --- memory: the slot or the pool is not what the caller thinks --------------------------------------------


class MemoryProtocolError(ShmstageError):
    """A pool or slot was used against its life cycle."""


class PoolError(MemoryProtocolError):
    """A pool cannot be made, mapped or closed."""


class StaleHandleError(MemoryProtocolError):
    """The slot has moved on to another generation or epoch; the handle names nothing any more."""


class ForkedError(MemoryProtocolError):
    """An endpoint was used in a forked child; start children with ``spawn``."""


class SlotStateError(MemoryProtocolError):
    """A slot was written after publication, published twice, or read after its lease ended."""


# --- transport: the other side ---------------------------------------------------------------------------


class TransportError(ShmstageError):
    """Messages do not get through."""

    exit_code = 6


class ProtocolError(TransportError):
    """A message or handle breaks the protocol; nothing was done with it."""


class AuthError(TransportError):
    """The peer's key is not the one the launcher handed out."""


class PeerLostError(TransportError):
    """The peer process is dead."""


class PeerRestartedError(TransportError):
    """The peer is another incarnation than the one addressed; nothing was done."""


class WaitTimeoutError(TransportError):
    """A deadline passed; the text says what was waited for and who holds it."""


class EndpointBusyError(TransportError):
    """Another living process already owns this endpoint."""

    exit_code = 2


class CancelledError(TransportError):
    """A request with a higher sequence arrived before this one was begun."""


# --- trainer: a command was refused or the work failed -----------------------------------------------------


class TrainerError(ShmstageError):
    """A command was refused or failed in the trainer."""


class UpdateDeferredError(TrainerError):
    """The step is still open: call ``apply_deferred_update`` first. Nothing was changed."""


class StageOccupiedError(TrainerError):
    """A staged micro-batch is unused; train it before staging another."""


class StageMismatchError(TrainerError):
    """``fwd_bwd_staged`` named another micro-batch than the one staged; the stage is kept."""


class GateClosedError(TrainerError):
    """The trainer accepts only ``info``, ``compile``, ``ranges``, ``restore_checkpoint`` and ``shutdown`` now."""


class TokenFailedError(TrainerError):
    """Device work that had been dispatched failed; only ``restore_checkpoint`` and ``shutdown`` are accepted."""


class EngineError(TrainerError):
    """The engine raised while it ran a command."""


class HostRegistrationError(TrainerError):
    """Host memory cannot be registered with the device runtime; uploads read it as ordinary memory.

    ``name`` is the runtime's own name of the error, "" if it never got to a runtime.
    """

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read."""


class RunFailedError(ShmstageError):
    """The run ended before its last step; the text says where to look."""


class StoppedError(ShmstageError):
    """The run was stopped by a signal."""

    exit_code = 130


def shown(value: object, limit: int = 80) -> str:
    """``value`` for an error's text: at most ``limit`` characters on one line, in bounded time, whatever it is.

    ``repr`` alone takes as long and grows as large as the value, and raises for deep nesting and for integers of more
    than 4300 digits.
    """
    text = _shown(value, limit, 3)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def named(name: str, limit: int = 80) -> str:
    """``name`` as it is, or ``shown`` if it is long or would break the line or the terminal it is printed on."""
    return name if len(name) <= limit and name.isprintable() else shown(name, limit)


def _shown(value: object, limit: int, depth: int) -> str:
    if isinstance(value, str | bytes):
        return repr(value[: limit + 1])
    if isinstance(value, int) and value.bit_length() > 256:
        return f"<integer of {value.bit_length()} bits>"
    if isinstance(value, dict):
        parts = (f"{_shown(key, limit, depth - 1)}: {_shown(item, limit, depth - 1)}" for key, item in value.items())
        return "{" + _joined(parts, limit, depth) + "}"
    if type(value) is list or type(value) is tuple:
        inner = _joined((_shown(item, limit, depth - 1) for item in value), limit, depth)
        return f"[{inner}]" if type(value) is list else f"({inner})"
    try:
        return " ".join(repr(value).split())
    except Exception:
        return f"<{type(value).__name__}>"


def _joined(parts: Iterator[str], limit: int, depth: int) -> str:
    if not depth:
        return "..."
    pieces: list[str] = []
    while sum(map(len, pieces)) <= limit and (piece := next(parts, None)) is not None:
        pieces.append(piece)
    return ", ".join(pieces)


def by_name() -> dict[str, type[ShmstageError]]:
    """Class name → class for every error here: how an error crosses the wire and keeps its class."""
    found: dict[str, type[ShmstageError]] = {}
    todo: list[type[ShmstageError]] = [ShmstageError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found
