"""Where trajectories come from: a bundle on disk or a source of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, cast, final

from shmstage.errors import PluginError, SettingsError, ShmstageError, TrajectoryError
from shmstage.packing.journal import STORE, Journal
from shmstage.packing.journal_source import JournaledSource
from shmstage.packing.recording import Replay, replay_of
from shmstage.packing.source import BundleSource, Source
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.plugins import make
from shmstage.settings import Settings


@final
class Input:
    """A source whose first trajectory is known before anything is planned; nothing read for that is lost.

    ``passes`` is how often it is run over: a source that cannot be replayed is run over once, through a journal in OUT
    that makes it replayable as far back as the newest durable checkpoint. ``source_is_replayable`` says which it is.
    ``replay`` is set where the input is what another run recorded.
    """

    replayable = True

    def __init__(self, source: Source, settings: Settings) -> None:
        """Raises ``TrajectoryError`` for an empty input, ``SettingsError`` for what a live source cannot do."""
        self.source_is_replayable = bool(getattr(source, "replayable", False))
        if not self.source_is_replayable and (settings.passes or 1) > 1:
            raise SettingsError(f"passes = {settings.passes}: the source cannot be replayed; use passes = 1")
        self.passes = settings.passes if self.source_is_replayable else 1
        self.expected_groups: Any = getattr(source, "expected_groups", None)
        self.replay: Replay | None = None
        if isinstance(source, BundleSource):
            self.replay = replay_of(source.bundle.manifest["provenance"], dict(settings))
        self.windows_are_microbatches = self.replay is not None and self.replay.is_exact
        self._on_weights = _method(source, "on_weights")
        self._close_source = _method(source, "close")
        if self._on_weights is not None and settings.weight_sync == "off":
            raise SettingsError(
                f'weight_sync = "off": source {settings.source or type(source).__name__} waits for weights (it has '
                'on_weights); use weight_sync = "sync", or "async" where it can do without a version'
            )
        self._journaled: JournaledSource | None = None
        if not self.source_is_replayable:
            directory = settings.out_dir / "journal"
            if any(directory.glob(f"{STORE}*")):
                raise SettingsError(
                    f"{directory} is of a `shmstage launch`; resume that with `launch`, or use another --out"
                )
            self._journaled = JournaledSource(source, Journal(directory))
        self._source: Source = self._journaled or source
        self._read: list[Group] = []
        self._begun: Iterator[Group] | None = None
        example = _method(source, "example")
        try:
            self.first = self._first_trajectory() if example is None else _checked_example(example())
        except BaseException:
            self.close()
            raise

    def groups(self, cursor: int) -> Iterator[Group]:
        """Groups from ``cursor`` on; the first call goes on with what was begun to look at the first trajectory."""
        begun, self._begun = self._begun, None
        read, self._read = self._read, []
        if cursor == 0 and begun is not None:
            return chain(read, begun)
        return iter(self._source.groups(cursor))

    def release(self, cursor: int, pass_number: int = 1) -> None:
        """Groups before number ``cursor`` of that pass are covered by a durable checkpoint."""
        if self._journaled is not None:
            self._journaled.journal.release(cursor)

    def weights_published(self, published: Mapping[str, Any]) -> None:
        """A version of the weights can be taken by readers; a source that samples hears of it.

        Raises ``PluginError`` for what the source raises, unless it is an error of ours.
        """
        if self._on_weights is None:
            return
        try:
            self._on_weights(published)
        except ShmstageError:
            raise
        except Exception as error:
            raise PluginError(
                f"the source's on_weights raised {type(error).__name__}: {error}, at version {published.get('version')}"
            ) from error

    def finish(self) -> None:
        """Nothing more will be read: a source that waits for something need not. Idempotent.

        What the source's close raises is said and ends nothing: all is trained, or there is a better reason already.
        """
        close, self._close_source = self._close_source, None
        if close is not None:
            try:
                close()
            except Exception as error:
                print(f"the source's close raised {type(error).__name__}: {error}; the run goes on", flush=True)

    def close(self) -> None:
        """End the source and close the journal; what is in it stays."""
        self.finish()
        if self._journaled is not None:
            self._journaled.journal.close()

    def _first_trajectory(self) -> Trajectory:
        if self._journaled is not None:
            first = self._journaled.first()
            if first is not None:
                return next(iter(first.trajectories))
        else:
            self._begun = iter(self._source.groups(0))
            for group in self._begun:
                self._read.append(group)
                if group.trajectories:
                    return group.trajectories[0]
        raise TrajectoryError("the input holds no trajectory; check the bundle or the source")


def _method(source: Source, name: str) -> Callable[..., Any] | None:
    found = getattr(source, name, None)
    return found if callable(found) else None


def _checked_example(example: object) -> Trajectory:
    if not isinstance(example, Trajectory) or not example.length:
        raise PluginError(
            f"the source's example() is a {type(example).__name__}, want a Trajectory of at least one token, with the "
            "fields that all of the source's trajectories carry"
        )
    return example


def load_input(settings: Settings) -> Input:
    """The input that the settings name. Raises ``BundleError``, ``PluginError``, or the factory's own."""
    if settings.bundle is not None:
        return Input(BundleSource(settings.bundle, settings.routing_encoding, settings.experts), settings)
    source = make("source", settings.source, settings.source_settings, needs=("groups",))
    return Input(cast(Source, source), settings)


def first_evaluated(evaluation: BundleSource | None) -> Trajectory | None:
    """Stands for all of an evaluation bundle: they carry the same fields."""
    return next(iter(evaluation.groups(0))).trajectories[0] if evaluation is not None else None


def evaluation_source(settings: Settings) -> BundleSource | None:
    """The evaluation bundle, if one is named. Raises ``BundleError``."""
    if settings.eval_bundle is None:
        return None
    return BundleSource(settings.eval_bundle, settings.routing_encoding, settings.experts)
