"""The pictures of the step boundary, one per order, and under each the numbered commands as the schedule gave them."""

from __future__ import annotations

from html import escape
from typing import Final, get_args

from docs_model import MICROBATCH, Drawing, Span, drawn_run

from shmstage.orchestrator.schedule import FORWARD, Command, Kind
from shmstage.settings import Boundary

STEP: Final = 3  # the boundary that is drawn leads into this step: the run is in its swing by then
BEFORE: Final = 3.0  # of the window, before L begins; and behind the beginning of F
AFTER: Final = 11.6
LABELS, WIDTH, ROW, TOP, BAR = 88, 840, 34, 30, 20
LANES: Final = {
    "packer": "packer",
    "calls": "calls",
    "bookkeeping": "bookkeeping",
    "uploads": "uploads",
    "device": "device",
    "snapshots": "snapshots",
}
#: words under a picture; `{name}` is the micro-batch, `{step}` the step
MEANING: Final = {
    Kind.FWD_BWD: "upload micro-batch {name}, then forward and backward",
    Kind.STAGE: "begin the upload of micro-batch {name} into the idle device buffer; the call returns at once",
    Kind.FWD_BWD_STAGED: "forward and backward of micro-batch {name}, which is staged already",
    Kind.APPLY_DEFERRED: "the update of step {step} that was held back",
    Kind.UPDATE: "the update of step {step}",
    Kind.GET_METRICS: "a ticket for the metrics of step {step}; nothing waits for their values",
    Kind.SAVE_CHECKPOINT: "a ticket for checkpoint {step}; copying and writing go on beside the devices",
    Kind.SYNC_WEIGHTS: "a ticket for weights {step}",
    Kind.BOOKKEEP: "not a call: metrics and step line of step {step} are written, your hooks hear of it",
}


def picture(mode: str) -> str:
    """`<figure>` with the drawing, then an ordered list of what its numbers are."""
    if mode not in get_args(Boundary):
        raise ValueError(f"boundary {mode!r}: there are {', '.join(get_args(Boundary))}")
    drawing = drawn_run(mode)  # type: ignore[arg-type]
    begin, end = window(drawing)
    numbered = numbered_in(drawing)
    idle = sum(b - a for a, b in drawing.idle.get(STEP, []))
    text = f"Order {mode}: the boundary from step {STEP - 1} to step {STEP}; the device waits {idle:.1f} units."
    return f"{_svg(drawing, numbered, begin, end, text)}\n\n{_list(numbered)}\n"


def numbered_in(drawing: Drawing) -> list[Span]:
    """From the call of step k's last micro-batch to step k+1's first forward call and step k's bookkeeping."""
    begin, end = window(drawing)
    found = [span for span in in_order(drawing) if begin < span.end and span.begin < end]
    ends = [n for n, span in enumerate(found) if span.command and _ends_the_boundary(span.command)]
    return found[: max(ends) + 1]


def _ends_the_boundary(command: Command) -> bool:
    is_first = command.kind in FORWARD and command.key == (STEP, 0)
    return is_first or (command.kind is Kind.BOOKKEEP and command.step == STEP - 1)


def in_order(drawing: Drawing) -> list[Span]:
    return sorted((s for s in drawing.spans if s.command is not None), key=lambda span: span.begin)


def window(drawing: Drawing) -> tuple[float, float]:
    """From the call of step k's last micro-batch, L, to where step k+1's first, F, runs on the device."""
    last = next(s for s in drawing.calls() if s.command and s.command.kind in FORWARD and _is_last(s.command))
    on_device = next(s for s in drawing.spans if s.lane == "device" and s.label == f"{STEP - 1}.{last.command.index}")
    first = next(s for s in drawing.spans if s.lane == "device" and s.label == f"{STEP}.0")
    return max(last.begin - 0.5, on_device.begin - BEFORE), first.begin + AFTER


def _is_last(command: Command) -> bool:
    return command.step == STEP - 1 and command.is_final


def what(command: Command) -> str:
    """As `shmstage compare` writes it."""
    name = f"{command.step}.{command.index}" if command.index >= 0 else str(command.step)
    if command.kind in (Kind.APPLY_DEFERRED, Kind.UPDATE):
        return command.kind.value
    return f"{command.kind.value} {name}{' defer' if command.defer_update else ''}"


def _list(numbered: list[Span]) -> str:
    lines = []
    for number, span in enumerate(numbered, start=1):
        command = span.command
        assert command is not None
        text = MEANING[command.kind].format(name=f"{command.step}.{command.index}", step=command.step)
        if command.defer_update:
            text += "; its update is held back"
        elif command.kind in FORWARD and command.is_final:
            text += f"; then the update of step {command.step}"
        shown = "bookkeeping" if command.kind is Kind.BOOKKEEP else f"`{what(command)}`"
        lines.append(f"{number}. {shown}: {text}")
    return "\n".join(lines)


def _svg(drawing: Drawing, numbered: list[Span], begin: float, end: float, text: str) -> str:
    scale = (WIDTH - LABELS - 8) / (end - begin)

    def x(t: float) -> float:
        return LABELS + (min(max(t, begin), end) - begin) * scale

    height = TOP + ROW * len(LANES) + 8
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(text)}">']
    for a, b in drawing.idle.get(STEP, []):
        parts.append(f'<rect class="d-idle" x="{x(a):.1f}" y="{TOP - 8}" width="{(b - a) * scale:.1f}" '
                     f'height="{height - TOP + 2}"/>')
        if (b - a) * scale > 40:
            parts.append(f'<text class="d-small d-idle-text" x="{x((a + b) / 2):.1f}" y="{TOP - 13}" '
                         f'text-anchor="middle">device idle</text>')
    rows = {lane: TOP + ROW * row for row, lane in enumerate(LANES)}
    for lane, y in rows.items():
        parts.append(f'<line class="d-line" x1="{LABELS}" x2="{WIDTH - 8}" y1="{y + BAR + 5}" y2="{y + BAR + 5}"/>')
        parts.append(f'<text class="d-label" x="{LABELS - 8}" y="{y + 15}" text-anchor="end">{LANES[lane]}</text>')
    for span in drawing.spans:
        if span.end <= begin or span.begin >= end:
            continue
        y, left, width = rows[span.lane], x(span.begin), x(span.end) - x(span.begin)
        parts.append(f'<rect class="d-{_colour(span)}" x="{left:.1f}" y="{y}" width="{max(width - 1, 1):.1f}" '
                     f'height="{BAR}" rx="3"><title>{escape(_said(span))}</title></rect>')
        if span.lane not in ("calls", "bookkeeping") and width > 7 * len(span.label):
            parts.append(f'<text class="d-small d-on" x="{left + width / 2:.1f}" y="{y + 14}" '
                         f'text-anchor="middle">{escape(span.label)}</text>')
    for number, span in enumerate(numbered, start=1):
        centre, y = x(span.begin) + 8.5, rows[span.lane] + BAR / 2
        parts.append(f'<circle class="d-dot" cx="{centre:.1f}" cy="{y}" r="8"/>')
        parts.append(f'<text class="d-number" x="{centre:.1f}" y="{y + 3.5}" text-anchor="middle">{number}</text>')
    return f'<figure class="drawing">{"".join(parts)}</svg></figure>'


def _colour(span: Span) -> str:
    if span.kind != MICROBATCH:
        return span.kind
    step = int(span.label.partition(".")[0])
    return "one" if step < STEP else "two" if step == STEP else "three"


def _said(span: Span) -> str:
    return what(span.command) if span.command else f"{span.lane}: {span.label}"
