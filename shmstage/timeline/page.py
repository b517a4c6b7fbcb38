"""One self-contained page from one or several run reports: no network, no fonts, nothing but the file. Pure."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

from shmstage.timeline import page_text
from shmstage.timeline.idle import CALIBRATION_SAMPLES
from shmstage.timeline.lanes import LANE_NAMES
from shmstage.timeline.legs import LEGS
from shmstage.timeline.run_report import RunReport
from shmstage.timeline.sampling import BOUNDARIES_KEPT, POINTS, SAMPLES

#: runs on one page: as many as there are colours that can be told apart
RUNS_AT_MOST: Final = 8
_MARKER: Final = re.compile(r"\{\{(\w+)\}\}")


def page_of(reports: Sequence[RunReport], warnings: Sequence[str] = ()) -> str:
    """HTML of the whole page. ``warnings``: what is to be said besides the runs' own."""
    heading, subtitle = page_text.heading(reports)
    style, script = _part("page.css"), _part("page_parts.js") + _part("page.js")
    return filled(_part("page.html"), {
        "policy": _policy(style, script),
        "title": f"{heading} – shmstage",
        "style": style,
        "heading": heading,
        "subtitle": subtitle,
        "warnings": page_text.warnings_of(reports, warnings),
        "figures_title": "Figures" if len(reports) == 1 else "Side by side",
        "figures": page_text.figures(reports),
        "grouped": page_text.grouped(reports),
        "kept": page_text.kept_note(reports),
        "legs": page_text.legs(reports),
        "memory": page_text.memory(reports),
        "history": page_text.history(reports),
        "calibration_samples": str(CALIBRATION_SAMPLES),
        "points": str(POINTS),
        "samples": str(SAMPLES),
        "boundaries_kept": str(BOUNDARIES_KEPT),
        "data": embedded(_data(reports)),
        "script": script,
    })  # fmt: skip


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Markers replaced in one pass: what a part says is never read as a marker."""
    return _MARKER.sub(lambda marker: parts[marker[1]], template)


def embedded(value: Any) -> str:
    """JSON that no HTML parser takes for markup, and no JSON parser for anything else."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(reports: Sequence[RunReport]) -> dict[str, Any]:
    return {
        "legs": list(LEGS),
        "lanes": list(LANE_NAMES.items()),
        "runs": [
            {
                "name": report.record.run,
                "mode": report.record.mode,
                "series": report.series,
                "median": report.figures.idle_median,
                "memory": report.memory,
                "boundaries": report.boundaries,
            }
            for report in reports
        ],
    }


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and nothing from anywhere: text that became markup could still do nothing."""
    return f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return files("shmstage.timeline").joinpath(name).read_text(encoding="utf-8")
