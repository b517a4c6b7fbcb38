"""`mkdocs build --strict` builds the pages, and a browser finds nothing wrong with them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import DOCS, ROOT
from skipping import skip_unless_ci

sys.path.insert(0, str(ROOT / "tests" / "timeline"))
from browser import DESK, PHONE, chromium


def build(site: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        skip_unless_ci("no mkdocs-material (pip install 'shmstage[docs]')")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    found = build(path)
    assert found.returncode == 0, found.stdout + found.stderr
    return path


@pytest.fixture(scope="module")
def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


@pytest.mark.slow
def test_every_page_is_built_and_nothing_is_left_to_be_made(site: Path, html: list[Path]) -> None:
    assert {p.relative_to(site).with_suffix(".md") for p in html} == {p.relative_to(DOCS) for p in DOCS.rglob("*.md")}
    for page in html:
        text = page.read_text()
        assert "<!-- made:" not in text and 'src="drawings' not in text, page
    assert not list(site.rglob("hooks*")) and not list(site.rglob("boundary.json"))


@pytest.mark.slow
def test_no_page_names_another_host_as_a_source(site: Path, html: list[Path]) -> None:
    outside = re.compile(r'<(?:script|img|iframe|link)[^>]+(?:src|href)="(?:https?:)?//[^"]+"')
    for page in [*html, site / "404.html"]:
        assert not outside.findall(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//", style.read_text()), style


@pytest.mark.slow
def test_wrong_links_fail_the_build(tmp_path: Path) -> None:
    for name in ("bench", "examples", "mkdocs.yml", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    _copy_with(tmp_path / "docs", "[x](no-such-page.md) [y](concepts.md#no-such-heading)\n")
    found = build(tmp_path / "site", tmp_path)
    said = found.stdout + found.stderr
    assert found.returncode != 0 and "'no-such-page.md'" in said and "'#no-such-heading'" in said, said


@pytest.mark.parametrize(
    "line", ["<!-- made: nothing here -->", "<!-- made: boundary sometimes -->", "![x](drawings/no-such.svg)"]
)
def test_what_cannot_be_made_is_an_error(line: str) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        skip_unless_ci("no mkdocs-material (pip install 'shmstage[docs]')")
    sys.path.insert(0, str(DOCS / "hooks"))
    docs_site = importlib.import_module("docs_site")
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=r"page\.md|no-such"):
        docs_site.complete(f"before\n\n{line}\n", Path("page.md"))


def _copy_with(docs: Path, text: str) -> None:
    docs.mkdir()
    for each in DOCS.iterdir():
        (docs / each.name).symlink_to(each)
    (docs / "loop.md").unlink()
    (docs / "loop.md").write_text(text)


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_pages_are_whole_ask_for_nothing_outside_fit_and_can_be_searched(site: Path, html: list[Path]) -> None:
    several = [path for path in html if path.parent.name != "decisions" or path.name == "index.html"]
    with chromium() as browser:
        for size, colours in ((DESK, "light"), (PHONE, "dark")):
            page = browser.open(several[0], size, colours)
            for path in several:
                page.goto(path.as_uri())
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= size[0], f"{path.name} is {wide} pixels wide"
                _check_drawings(page, path)
            if size == DESK:
                _search(page, site)
        assert [request for request in browser.requests if not request.startswith("file:")] == []
        assert browser.said == []


def _search(page: Any, site: Path) -> None:
    """Also from a page opened as a file."""
    page.goto((site / "operate" / "errors.html").as_uri())
    page.locator("input.md-search__input").first.fill("latch")
    page.locator(".md-search-result__link").first.wait_for(state="attached")
    found = page.locator(".md-search-result__link").first.get_attribute("href")
    assert found and (site / re.sub(r"^.*/site\d*/|[?#].*$", "", found)).is_file(), found


def _check_drawings(page: Any, path: Path) -> None:
    """Every shape has a colour of the page's, and no text is cut off."""
    found = page.evaluate(
        """() => [...document.querySelectorAll('figure.drawing svg')].map(svg => {
            const box = svg.getBoundingClientRect();
            const out = b => b.left < box.left - 1 || b.right > box.right + 1
                || b.bottom > box.bottom + 2 || b.top < box.top - 2;
            const texts = [...svg.querySelectorAll('text')], rects = [...svg.querySelectorAll('rect')];
            return {
                height: box.height, label: svg.getAttribute('aria-label') || '',
                cut: texts.filter(each => out(each.getBoundingClientRect())).map(each => each.textContent),
                plain: rects.filter(each => getComputedStyle(each).fill === 'rgb(0, 0, 0)').length,
            };
        })"""
    )
    for drawing in found:
        assert drawing["height"] > 50 and len(drawing["label"]) > 20, (path, drawing)
        assert drawing["cut"] == [] and drawing["plain"] == 0, (path, drawing)
    assert ('figure class="drawing"' in path.read_text()) == bool(found)
