"""What is noted of one path at one size, and how its ends are found."""

from __future__ import annotations

import importlib
from typing import Any

from results import spread

from paths import Path
from paths.ends import Arrays
from paths.peer import PathError, ProcessPeer
from paths.proof import where


def ends_of(path: Path) -> Any:
    """The module with its ``Sender`` and ``Receiver``."""
    return importlib.import_module(f"paths.{path.module}")


def peer_of(path: Path, largest_nbytes: int) -> Any:
    """The process at the other end: of the module's own kind, or one that is started and asked over a pipe."""
    return getattr(ends_of(path), "Peer", ProcessPeer)(path, largest_nbytes)


class Cell:
    def __init__(self) -> None:
        self.hand_off_s: list[float] = []
        self.whole_path_s: list[float] = []
        self.read_s: list[float] = []
        #: over the baseline, in which one private packed buffer is
        self.peak_nbytes = 0
        self._is_private = False

    def received(self, report: dict[str, Any], path: Path, sent: Arrays) -> None:
        """Raises ``PathError`` if bytes that are said not to be copied lie elsewhere at the receiver, or reversed."""
        self.read_s.append(report["read_s"])
        sent_from = where(sent)
        self._is_private = sent_from is None
        same = sent_from is not None and sent_from == report["where"]
        if same != (path.copied_payloads == 0):
            raise PathError(
                f"{path.name} is said to copy {path.copied_payloads} times; sent from {sent_from or 'private memory'}, "
                f"received in {report['where'] or 'private memory'}"
            )

    def figure(self, path: Path, size: int, nbytes: int) -> dict[str, Any]:
        peak_nbytes = max(0, self.peak_nbytes) + (nbytes if self._is_private else 0)
        return {
            "path": path.name,
            "nbytes": size,
            "payload_nbytes": nbytes,
            "hand_off_s": spread(self.hand_off_s),
            "whole_path_s": spread(self.whole_path_s),
            "read_s": spread(self.read_s),
            "copied_nbytes": path.copied_payloads * nbytes,
            "copied_payloads": path.copied_payloads,
            "peak_nbytes": peak_nbytes,
            "peak_payloads": peak_nbytes / nbytes,
        }
