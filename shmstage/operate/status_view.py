"""A run's state for people: the answer first, then who, what memory, how far. Wraps to any width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shmstage.memory.inspect import NOBODY, CellSnapshot, HolderSnapshot, PoolSnapshot, ProcessSnapshot, SlotSnapshot
from shmstage.memory.limits import format_nbytes
from shmstage.operate.run_status import RunStatus
from shmstage.operate.step_tail import Progress

#: slots in use that are shown one by one
MAX_ROWS = 32
#: columns that the table of slots needs
WIDE = 64
_COLOURS = {
    "running": "green", "finished": "green", "alive": "green", "starting": "cyan", "ended": "cyan",
    "restarting": "yellow", "stopped": "yellow", "unclear": "yellow", "orphaned": "yellow", "failed": "red",
    "killed": "red",
}  # fmt: skip


def run_view(status: RunStatus) -> Group:
    """One run in full. Its bare ``Text`` parts are to be copied: print them with ``soft_wrap``, as ``show`` does."""
    parts: list[RenderableType] = [Padding(_headline(status), 0)]
    parts += [Text(f"  → {remedy}", style="bold") for remedy in status.verdict.remedies]
    if status.out is not None:
        parts.append(Text(f"  OUT {status.out}"))
    parts += [_indented(Text("note: " + note, style="yellow")) for note in status.notes]
    parts += [Text(""), _processes(status)]
    if status.out is not None:
        parts += [Text(""), _training(status)]
    roles = {process.pid: process.role for process in status.processes if process.pid}
    for pool in status.pools:
        parts += [Text(""), _pool(pool, roles)]
    if not status.pools:
        parts += [Text(""), Text("no pool in shared memory")]
    return Group(*parts)


def show(view: Group, console: Console) -> None:
    """Print a view. What is meant to be copied is not broken into lines: the terminal does that."""
    for part in view.renderables:
        console.print(part, soft_wrap=isinstance(part, Text))


def runs_view(statuses: Sequence[RunStatus]) -> Group:
    """Several runs, a paragraph each: a table would need more columns than a terminal has."""
    parts: list[RenderableType] = []
    for status in statuses:
        slots = [slot for pool in status.pools if not _is_weights(pool) for slot in pool.slots]
        facts = [
            f"step {status.progress.last['step']}" if status.progress is not None else "",
            f"{sum(slot.state != 'free' for slot in slots)} of {len(slots)} slots in use" if slots else "",
            f"{format_nbytes(sum(pool.allocated_nbytes for pool in status.pools))} of shared memory",
        ]
        parts.append(Padding(_headline(status), 0))
        parts.append(_indented(Text(" · ".join(fact for fact in facts if fact))))
    return Group(*parts, Text("`shmstage status RUN` shows one of them in full"))


def format_seconds(seconds: float) -> str:
    """Two units at most: 3.2 s, 4 min 5 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 0.0995:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 6000:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


# --- parts ------------------------------------------------------------------------------------------------


def _headline(status: RunStatus) -> Text:
    state = status.verdict.state
    head = Text.assemble(
        (f"run {status.run}" if status.run else "a run without a name"), " · ", (state, f"bold {_COLOURS[state]}")
    )
    return head.append(f" · {status.verdict.text}")


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2))


def _table(*columns: str, right: Iterable[str] = (), last_folds: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        folds = last_folds and column == columns[-1]
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not folds, overflow="fold")
    return table


def _life(process: ProcessSnapshot, *, in_order: bool = False) -> Text:
    if process.alive is None:
        return Text("not known", style="yellow")
    if not process.alive:
        return Text("-") if not process.pid else Text("ended") if in_order else Text("dead", style="red")
    if process.state in ("", "running"):
        return Text("alive", style="green")
    return Text(f"alive, {process.state}", style="yellow")


def _processes(status: RunStatus) -> RenderableType:
    table = _table("process", "pid", "state", "", right=["pid"])
    for process in status.processes:
        restarts = (status.restarts or {}).get(process.role, 0)
        note = f"restarted {restarts} time{'s' * (restarts > 1)}" if restarts else ""
        said = (status.failures or {}).get(process.role, "")
        pid = str(process.pid) if process.pid else "-"
        life = _life(process, in_order=status.verdict.state in ("finished", "ended"))
        role = Text(process.role or "?")  # as a lock file says
        table.add_row(role, pid, life, Text("; ".join(part for part in (note, said) if part)))
    return table


def _training(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    of = f" of {status.steps}" if status.steps is not None else ""
    if status.progress is None:
        grid.add_row("step", Text(f"none{of} is complete yet"))
    else:
        for name, text in _progress_rows(status.progress, of):
            grid.add_row(name, Text(text))
    grid.add_row("checkpoint", Text("none" if status.checkpoint is None else f"of step {status.checkpoint}"))
    return grid


def _progress_rows(progress: Progress, of: str) -> list[tuple[str, str]]:
    last = progress.last
    ago = "" if progress.seconds_ago is None else f", {format_seconds(progress.seconds_ago)} ago"
    speed = progress.steps_per_s
    pace = f"{speed:.3g} steps/s" if speed >= 1 else f"{format_seconds(1 / speed)} per step" if speed else "-"
    rates = f"{pace} · {progress.tokens_per_s:,.0f} tokens/s · {format_nbytes(round(progress.bytes_per_s))}/s"
    latch = last["latch"] if isinstance(last["latch"], dict) else {}
    is_staging = str(last["mode"]).startswith("staged")  # the latch judges nothing else
    staged = "staged" if last["staged"] else f"not staged: {_words(last['not_staged_because'])}"
    return [
        ("step", f"{last['step']}{of}{ago} (attempt {last['attempt']}, {last['mode']}), loss {_words(last['loss'])}"),
        ("last rates", f"{rates} (over {progress.steps_measured} step{'s' * (progress.steps_measured > 1)})"),
        ("boundary", f"idle {_time(last['boundary_idle_s'])}, {staged}"),
        ("upload", f"{_time(last['upload_s'])} a step, {_time(last['exposed_s'])} of the first exposed"),
        ("waits", f"{_time(last['slot_wait_s'])} for a slot, {_time(last['data_wait_s'])} for data"),
        *([("latch", f"{_words(latch.get('level'))}: {_words(latch.get('reason'))}")] if is_staging else []),
    ]


def _time(seconds: Any) -> str:
    return format_seconds(seconds) if isinstance(seconds, int | float) else "-"


def _words(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:+.4g}" if isinstance(value, float) else str(value)


# --- pools ------------------------------------------------------------------------------------------------


def _is_weights(pool: PoolSnapshot) -> bool:
    return pool.newest_slot is not None or bool(pool.cells) or pool.owner.role == "trainer"


def _pool(pool: PoolSnapshot, roles: Mapping[int, str]) -> RenderableType:
    is_weights = _is_weights(pool)
    what, which = ("weights pool", "incarnation") if is_weights else ("pool", "epoch")
    head = Text.assemble((what, "bold"), f" {pool.name} · {format_nbytes(pool.allocated_nbytes)}")
    parts: list[RenderableType] = [head]
    if pool.owner != NOBODY:
        head.append(f" · {which} {pool.epoch} · of ").append_text(_owner(pool.owner))
    if pool.problem:
        parts.append(_indented(Text(pool.problem, style="yellow")))
    if pool.last_error:
        parts.append(_indented(Text(f"last error: {pool.last_error}", style="red")))
    if pool.slots:
        parts.append(_indented(Text(_facts(pool))))
        parts.append(Padding(_weights(pool) if is_weights else _slots(pool, roles), (0, 0, 0, 2)))
    return Group(*parts)


def _owner(owner: ProcessSnapshot) -> Text:
    return Text.assemble(f"{owner.role or 'process'} {owner.pid} (", _life(owner), ")")


def _facts(pool: PoolSnapshot) -> str:
    counters = pool.counters or {}
    parts = [
        f"{len(pool.slots)} slots of {format_nbytes(pool.slot_nbytes)}",
        ("huge pages" if pool.huge_pages else "normal pages") + f", NUMA {pool.numa}",
        *([f"heartbeat {format_seconds(pool.heartbeat_s)} ago"] if pool.heartbeat_s is not None else []),
        ", ".join(f"{counters.get(key, 0)} {key.replace('_', ' ')}" for key in ("published", "withdrawn", "abandoned")),
        f"waited {counters.get('waits', 0)} times, {format_seconds(counters.get('waited_ns', 0) / 1e9)} in all",
    ]
    return " · ".join(parts)


def _slots(pool: PoolSnapshot, roles: Mapping[int, str]) -> RenderableType:
    table = _table("slot", "state", "gen", "micro-batch", "for", "held by", right=["slot", "gen", "for"])
    used = [slot for slot in pool.slots if slot.state != "free"]
    few = pool.slots if len(pool.slots) <= MAX_ROWS else used[:MAX_ROWS]
    for slot in few:
        table.add_row(
            f"{slot.number} aux" if slot.aux else str(slot.number),
            Text(slot.state, style="" if slot.state == "free" else "bold"),
            str(slot.generation),
            f"{slot.step}.{slot.index}" if slot.state == "published" else "-",
            "-" if slot.seconds is None else format_seconds(slot.seconds),
            _holders(slot, pool.owner, roles),
        )
    shown = _Adaptive(table, [_slot_line(slot, pool.owner, roles) for slot in few])
    if len(few) == len(pool.slots):
        return shown
    return Group(shown, Text(f"not shown: {len(pool.slots) - len(few)} slots, of them {len(used) - len(few)} in use"))


@final
class _Adaptive:
    """The table, or on a narrow terminal the lines: no cell is cut off."""

    def __init__(self, table: Table, lines: Sequence[Text]) -> None:
        self._table = table
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= WIDE:
            yield self._table
        else:
            yield from self._lines


def _slot_line(slot: SlotSnapshot, owner: ProcessSnapshot, roles: Mapping[int, str]) -> Text:
    line = Text(f"slot {slot.number}{' aux' if slot.aux else ''}: {slot.state} (gen {slot.generation})")
    if slot.state == "published":
        line.append(f", {slot.step}.{slot.index}")
    if slot.state == "free":
        return line
    line.append("" if slot.seconds is None else f", for {format_seconds(slot.seconds)}")
    return line.append(", by ").append_text(_holders(slot, owner, roles))


def _holders(slot: SlotSnapshot, owner: ProcessSnapshot, roles: Mapping[int, str]) -> Text:
    if slot.state == "writing":
        return _owner(owner)
    return Text(", ").join(_holder(holder, roles) for holder in slot.holders)


def _holder(holder: HolderSnapshot, roles: Mapping[int, str]) -> Text:
    role = roles.get(holder.pid) or f"consumer {holder.consumer}"
    if not holder.pid:
        return Text(f"{role} (not attached)")
    return _owner(ProcessSnapshot(role, holder.pid, holder.alive, "", ""))


def _weights(pool: PoolSnapshot) -> RenderableType:
    table = _table("place", "version", "for", "read by", right=["place", "version", "for"])
    for slot in pool.slots:
        readers = [cell for cell in pool.cells if cell.slot == slot.number]
        newest = [Text("the newest", style="green")] if slot.number == pool.newest_slot else []
        holds = slot.state == "published" or bool(readers) or bool(newest)
        table.add_row(
            str(slot.number),
            str(slot.step) if holds else slot.state if slot.state == "writing" else "-",
            "-" if slot.seconds is None else format_seconds(slot.seconds),
            Text(", ").join([*newest, *map(_reader, readers)]),
        )
    idle = [cell for cell in pool.cells if cell.slot is None]
    if not idle:
        return table
    return Group(table, Text("attached, reading nothing now: ").append_text(Text(", ").join(map(_reader, idle))))


def _reader(cell: CellSnapshot) -> Text:
    return _owner(cell.reader)
