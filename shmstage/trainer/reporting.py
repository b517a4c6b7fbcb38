"""Telling the other side how something ended, so that nobody waits for an event that never comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from shmstage.errors import ProtocolError, ShmstageError
from shmstage.wire.messages import TicketEvent, TokenEvent

log = logging.getLogger(__name__)

TEXT_LIMIT = 2000
"""Characters of an error's text that travel; some libraries append their whole input."""

Event = TypeVar("Event", TokenEvent, TicketEvent)


def report(emit: Callable[[Event], None], event: Event) -> Event:
    """Emit ``event``; if it cannot travel, the same one as failed, without its value. Returns the one told last.

    Never raises: the threads that call this outlive whoever listens.
    """
    try:
        emit(event)
    except ProtocolError as refused:  # it was not numbered; after any other error it may be on its way already
        log.exception("%s of step %d cannot be reported as it is", event.kind, event.step)
        event = _as_failed(event, f"{event.kind} of step {event.step} cannot be reported: {describe(refused)}")
        try:
            emit(event)
        except Exception:
            log.exception("%s of step %d could not be reported", event.kind, event.step)
    except Exception:
        log.exception("%s of step %d could not be reported", event.kind, event.step)
    return event


def _as_failed(event: Event, why: str) -> Event:
    # half of the room for each; a lone surrogate in a foreign text could not be encoded either
    first = event.error[: TEXT_LIMIT // 2]
    text = (f"{first}; {why}" if first else why)[:TEXT_LIMIT].encode("utf-8", "backslashreplace").decode()
    if isinstance(event, TicketEvent):
        return replace(event, ok=False, error=text, value={})
    return replace(event, ok=False, error=text)


def describe(error: BaseException) -> str:
    """The error in one line; ours carry their text, foreign ones their class as well."""
    text = " ".join(str(error).split())
    if not text or not isinstance(error, ShmstageError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:TEXT_LIMIT]


def python_numbers(value: Any) -> Any:
    """The same lists and dicts with numpy scalars replaced by Python's: only those travel."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: python_numbers(item) for key, item in value.items()}
    if type(value) is list:
        return [python_numbers(item) for item in value]
    return value
