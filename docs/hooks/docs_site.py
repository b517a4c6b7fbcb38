"""What mkdocs asks of us: pages get what is made from the code, and drawings are put into the page.

A line `<!-- made: NAME ARGUMENTS -->` in a page is replaced by what `MADE[NAME]` gives, or the build fails. A drawing,
`![text](drawings/NAME.svg)`, is put into the page itself: its colours then follow the page's, dark or light.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
for place in (ROOT, HERE):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import docs_boundary  # noqa: E402
import docs_charts  # noqa: E402
import docs_reference  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402

INDEX: Final = "decisions/index.md"
DECISIONS: Final = sorted((HERE.parent / "decisions").glob("0*.md"))

_MADE: Final = re.compile(r"^( *)<!-- made: (\S+) ?(.*?) -->$", re.MULTILINE)
_DRAWING: Final = re.compile(r"^!\[([^\]]+)\]\(((?:\.\./)*drawings/[\w-]+\.svg)\)$", re.MULTILINE)
_STYLE: Final = re.compile(r"<style>.*?</style>\s*", re.DOTALL)


def example(path: str) -> str:
    """A file of examples/, whole."""
    file = ROOT / path
    return f'```python title="{path}"\n{file.read_text().rstrip()}\n```'


def file_part(path: str) -> str:
    """A Markdown file that lies outside docs/, without its title; its headings keep their level."""
    return re.sub(r"\A# .*\n", "", (ROOT / path).read_text())


def only_section(arguments: str) -> str:
    """`FILE HEADING`: one section of a Markdown file, without its heading."""
    path, _, heading = arguments.partition(" ")
    text = (ROOT / path).read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} has no section {heading!r}")
    return found[1].strip()


def decisions(_: str) -> str:
    """A list of all pages of decisions, by their titles."""
    return "\n".join(f"* [{path.read_text().splitlines()[0].removeprefix('# ')}]({path.name})" for path in DECISIONS)


MADE: Final = {
    "decisions": decisions,
    "settings": lambda _: docs_reference.settings(),
    "commands": lambda _: docs_reference.commands(),
    "exit-codes": lambda _: docs_reference.exit_codes(),
    "errors": lambda _: docs_reference.error_classes(),
    "boundary": docs_boundary.picture,
    "chart": docs_charts.chart,
    "example": example,
    "file": file_part,
    "section": only_section,
}


def on_config(config: Any) -> Any:
    """Called by mkdocs: a new decision needs no line in `mkdocs.yml`."""
    _put_decisions(config["nav"])
    return config


def _put_decisions(nav: list[Any]) -> None:
    for entry in nav:
        for inner in entry.values() if isinstance(entry, dict) else ():
            if isinstance(inner, list):
                _put_decisions(inner)
    if INDEX in nav:
        nav += [f"decisions/{path.name}" for path in DECISIONS]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return complete(markdown, Path(page.file.src_uri))


def complete(markdown: str, page: Path) -> str:
    """The page with all that is made put in; ``page`` is its path below docs/."""

    def made(found: re.Match[str]) -> str:
        indent, name, arguments = found.groups()
        if name not in MADE:
            raise PluginError(f"{page}: {found[0]}: there are {', '.join(MADE)}")
        try:
            return indent + str(MADE[name](arguments)).replace("\n", f"\n{indent}")
        except (ValueError, OSError) as error:
            raise PluginError(f"{page}: {found[0]}: {error}") from error

    def drawn(found: re.Match[str]) -> str:
        text, path = found.groups()
        return f'<figure class="drawing">{inlined(HERE.parent / page.parent / path, text)}</figure>'

    return _DRAWING.sub(drawn, _MADE.sub(made, markdown))


def inlined(path: Path, text: str) -> str:
    """A drawing without the colours of its own, which are for viewers that show the file alone."""
    try:
        svg = path.resolve().read_text()
    except OSError as error:
        raise PluginError(f"{path}: {error.strerror}") from error
    svg = _STYLE.sub("", svg[svg.index("<svg") :])
    label = text.replace("&", "&amp;").replace('"', "&quot;")
    return re.sub(r"\n\s*", "\n", svg).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).strip()
