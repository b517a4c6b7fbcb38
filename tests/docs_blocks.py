"""The code blocks of README and docs: found, told apart, and run page by page as a reader would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"

#: what a block may be; anything else, and a block without a name for what it is, is refused (see `kind_of`)
KINDS: Final = ("python", "toml", "bash", "yaml")
DEADLINE_S: Final = 240.0

_FENCE: Final = re.compile(
    r"^(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE
)
_TITLE: Final = re.compile(r'title="([^"]+)"')
_NAMED: Final = re.compile(r"\A# ([\w.-]+\.(?:py|toml))\b")
_NOT_RUN: Final = re.compile(r"<!-- not run: (\S[^\n]*) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """``title``: the file that it is; ``not_run``: the reason why it is only checked."""

    page: Path
    line: int
    kind: str
    text: str
    title: str
    not_run: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}:{self.line}"


def pages() -> list[Path]:
    """README and every page, those that are included in one as well."""
    return [README, ROOT / "bench" / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    return list(blocks_in(page.read_text(), page))


def blocks_in(text: str, page: Path) -> Iterator[Block]:
    """Fenced blocks in their order. Indented ones are refused in pages; `bench/README.md` has commands in them."""
    for found in _FENCE.finditer(text):
        info, inner = found["info"].strip(), found["text"]
        title, named = _TITLE.search(info), _NAMED.match(inner)
        reason = _NOT_RUN.search(text[: found.start()])
        yield Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            info.split()[0].partition("{")[0] if info else "",
            inner,
            title[1] if title else named[1] if named else "",
            reason[1] if reason else "",
        )
    rest = _FENCE.sub("", text)
    for found in re.finditer(r"(?:\A|\n\n)((?: {4}[^ \n*<-][^\n]*\n)+)", rest):
        yield Block(page, 0, "indented", re.sub("^ {4}", "", found[1], flags=re.MULTILINE), "", "")


def kind_of(block: Block) -> str:
    """`README.md` and `bench/README.md` leave commands and drawings unnamed: they are known by what is in them."""
    if block.kind in KINDS:
        return block.kind
    if not block.kind or block.kind == "indented":
        if block.page.is_relative_to(DOCS):
            raise AssertionError(f"{block.place}: a block without a kind; name one of {', '.join(KINDS)}")
        return "drawing" if re.search("[┌└─▶]", block.text) else "bash"
    raise AssertionError(f"{block.place}: no test runs a block of the kind {block.kind!r}; use {', '.join(KINDS)}")


def environment(cache: Path) -> dict[str, str]:
    """As `command_line.start` has it, and `shmstage` and `python` are those of this environment and this tree."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": "2",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def run_page(blocks: list[Block], directory: Path, cache: Path) -> list[str]:
    """Runs blocks in their order in ``directory``; what went wrong, in words."""
    problems = []
    for block in blocks:
        kind = kind_of(block)
        if block.title:
            (directory / block.title).write_text(block.text)
        if kind in ("yaml", "toml", "drawing") or block.not_run or (kind == "python" and block.title):
            continue
        bash, python = ["bash", "-euo", "pipefail", "-c"], [sys.executable, "-c"]
        command = [*(bash if kind == "bash" else python), block.text]
        code, said = _run(command, directory, environment(cache))
        if code:
            problems.append(f"{block.place} ended with {code}:\n{block.text}\n{said.strip()[-1500:]}")
            break  # what follows builds on it
    return problems


def _run(command: list[str], directory: Path, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and what it said; nothing that it started is left."""
    process = subprocess.Popen(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # a launcher takes its children with it
        said, _ = process.communicate(timeout=30)
        return process.returncode or 1, f"{said}\nit took longer than {DEADLINE_S:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
