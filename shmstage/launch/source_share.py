"""Which groups of a source one store gives, and under which numbers the whole fleet knows them."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, cast, final

from shmstage.errors import PluginError, SettingsError
from shmstage.packing.journal import STORE, Journal
from shmstage.packing.journal_source import JournaledSource
from shmstage.packing.source import BundleSource, Source
from shmstage.packing.trajectory import Group
from shmstage.plugins import make
from shmstage.settings import Settings

#: `OUT/journal/store-<index>-of-<stores>`: what a live source gave this store
JOURNAL = "journal"


@final
class SourceShare:
    """Store ``index`` of ``count``. Groups carry the number they have in the whole fleet.

    A replayable source is run over in every store, and group n is given by store n % count. A live one with
    ``shard(index, count) -> Source`` is asked for its part, whose n-th group gets number n * count + index. Any other
    live source is asked in store 0 alone, which then gives everything: ``gives`` is false in the others.

    Attributes: ``replayable`` (of the source itself), ``sharded``, ``stores`` (how many give), ``expected_groups``.
    """

    def __init__(self, source: Source, index: int, count: int, journal: Path) -> None:
        self.replayable = bool(getattr(source, "replayable", False))
        if callable(getattr(source, "on_weights", None)):
            raise SettingsError(
                f"the source, a {type(source).__name__}, waits for weights (it has on_weights); `launch` hands "
                "sources none: train it with `shmstage run`"
            )
        self._shard = None if self.replayable else getattr(source, "shard", None)
        self.sharded = self._shard is not None
        self.stores = count if self.replayable or self.sharded else 1
        self.gives = index < self.stores
        self._index = index
        self._journaled: JournaledSource | None = None
        if self._shard is not None:
            source = self._shard(index, count)
            if not callable(getattr(source, "groups", None)):
                raise PluginError(f"the source's shard({index}, {count}) is a {type(source).__name__}, without groups")
        self.expected_groups: Any = getattr(source, "expected_groups", None)
        if not self.replayable:
            check_journal(journal, self.stores)
        if not self.replayable and self.gives:
            source = self._journaled = JournaledSource(source, Journal(journal / f"{STORE}{index}-of-{self.stores}"))
        self._source = source

    def groups(self, cursor: int) -> Generator[tuple[int, Group | None], None, None]:
        """(number, group) of this share, number >= ``cursor``, in order.

        Of a replayable source also what others give, as (number, ``None``): reading it takes its time, too.
        """
        if self.replayable:
            for number, group in enumerate(self._source.groups(cursor), cursor):
                yield number, group if number % self.stores == self._index else None
            return
        if not self.gives:
            return
        own = max(0, -(-(cursor - self._index) // self.stores))
        for number, group in enumerate(self._source.groups(own), own):
            yield number * self.stores + self._index, group

    def first(self) -> tuple[int, Group] | None:
        """The first group of this share that has a trajectory, and its number; waits for it if it has not come yet.

        The same for as long as the run lives: of a live source the journal keeps it, under the share's first number.
        """
        if self._journaled is not None:
            group = self._journaled.first()
            return (self._index, group) if group is not None else None
        own = (each for each in self.groups(0) if each[1] is not None and each[1].trajectories)
        return cast("tuple[int, Group] | None", next(own, None))

    def release(self, number: int) -> None:
        """Groups before ``number`` will not be asked for again. Raises ``BundleError``."""
        if self._journaled is not None:
            self._journaled.journal.release(max(0, -(-(number - self._index) // self.stores)))

    def close(self) -> None:
        """What is journaled stays."""
        if self._journaled is not None:
            self._journaled.journal.close()


def check_journal(directory: Path, stores: int) -> None:
    """Raises ``SettingsError`` for a journal of ``run``, or of a launch whose groups were numbered otherwise."""
    found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    for name in found:
        if not name.startswith(STORE):
            raise SettingsError(
                f"{directory}: {name} is of a `shmstage run`; resume that with `run`, or use another --out"
            )
        if not name.endswith(f"-of-{stores}"):
            raise SettingsError(
                f"{directory}: {name} is of a launch with another number of hosts than {stores}; resume it with that "
                "--hosts, or use another --out"
            )


def evaluation_share(settings: Settings, index: int, count: int) -> SourceShare | None:
    """This store's share of the evaluation bundle, if one is named. Raises ``BundleError``."""
    if settings.eval_bundle is None:
        return None
    source = BundleSource(settings.eval_bundle, settings.routing_encoding, settings.experts)
    return SourceShare(source, index, count, Path())


def share_of(settings: Settings, index: int, count: int) -> SourceShare:
    """This store's share of what the settings name. Raises ``BundleError``, ``PluginError``, or the factory's own."""
    source: Source
    if settings.bundle is not None:
        source = BundleSource(settings.bundle, settings.routing_encoding, settings.experts)
    else:
        source = cast(Source, make("source", settings.source, settings.source_settings, needs=("groups",)))
    return SourceShare(source, index, count, settings.out_dir / JOURNAL)
