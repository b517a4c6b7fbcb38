"""The documentation says what is so: blocks are of kinds that are checked, and what is made is made from the code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from docs_blocks import DOCS, README, ROOT, Block, blocks_of, kind_of, pages
from jsonschema import validate

sys.path.insert(0, str(DOCS / "hooks"))
import docs_boundary
import docs_charts
import docs_commands
import docs_reference
from docs_commands import WrongCommand
from docs_model import drawn_run

from shmstage import errors
from shmstage.cli import COMMANDS
from shmstage.settings import BOUNDARIES, SWITCHES, Boundary, Settings
from shmstage.testing.boundary_table import expected_calls


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


# --- blocks --------------------------------------------------------------------------------------------------------


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    for block in all_blocks():
        kind_of(block)


@pytest.mark.parametrize("text", ["```\nx\n```\n", "```text\nx\n```\n", "~~~ini\nx\n~~~\n", "a\n\n    indented\n"])
def test_a_block_of_another_kind_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "no-such-page.md"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    with pytest.raises(AssertionError, match="block"):
        [kind_of(block) for block in blocks_of(page)]


def test_a_block_that_is_not_run_says_why_and_a_test_that_it_names_is_there() -> None:
    found = [block for block in all_blocks() if block.not_run]
    assert found
    for block in found:
        for name in re.findall(r"tests/\S+\.py", block.not_run):
            assert (ROOT / name).is_file(), block.place
    assert not re.search("<!-- not run *-->", "".join(page.read_text() for page in pages()))


def test_every_shell_line_is_one_that_its_command_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked = 0
    for page in pages():
        files: dict[str, str] = {}
        for block in blocks_of(page):
            if block.title:
                files[block.title] = block.text
            if kind_of(block) != "bash":
                continue
            if page in (README, ROOT / "bench" / "README.md"):  # they name files before they show them
                files |= {other.title: other.text for other in blocks_of(page) if other.title}
            text = re.sub(r"^.*\|\| test \$\? = .*$", "", block.text, flags=re.M)  # wrong on purpose, and run
            for words in docs_commands.calls_in(text):
                try:
                    docs_commands.check(words, files)
                except WrongCommand as error:
                    raise AssertionError(f"{block.place}: {' '.join(words)}: {error}") from error
                checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    "line",
    [
        "shmstage rum", "shmstage run --row 3x", "shmstage run --no-such-flag", "shmstage run --boundary sometimes",
        "shmstage run --config nowhere.toml", "shmstage bundle import", "make nothing", "python bench/nothing.py",
        "python bench/boundary.py --no-such-option 3", "pip install 'shmstage[nothing]'",
        "pip install -e 'shmstage[ray]'", "kubectl apply",
        "docker run --no-such-option image", "docker run --shm-size=1g image shmstage run --rows none",
        "echo x && shmstage gc --nothing",
    ],
)  # fmt: skip
def test_a_wrong_shell_line_is_noticed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongCommand):
        for words in docs_commands.calls_in(line):
            docs_commands.check(words, {})


def test_every_toml_block_is_a_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [block for block in all_blocks() if kind_of(block) == "toml"]
    assert len(found) >= 7
    for block in found:
        docs_commands.check_settings(block.text)
    for wrong in ("rows = 0\n", "row = 3\n", "rows = \n", '[engine]\nfactory = 3\n'):
        with pytest.raises(WrongCommand):
            docs_commands.check_settings(wrong)


def test_every_yaml_block_is_the_pod_of_a_job_with_room_for_its_shared_memory() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "launch"))
    import jobset_schema

    found = [yaml.safe_load(block.text) for block in all_blocks() if kind_of(block) == "yaml"]
    assert found
    for pod in found:
        validate(pod, jobset_schema.POD)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            size = int(mounts["/dev/shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
            assert 2 * size <= int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
            for words in [[*container["command"], *container["args"]]]:
                docs_commands.check([w for w in words if w != "--config" and not w.endswith(".toml")], {})


def test_files_that_pages_name_are_there() -> None:
    named = re.compile(r"`((?:examples|bench|tests|shmstage|docs)/[\w./-]*)`")
    missing = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages()
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
        and not any(ROOT.glob(f"{path}-*.md"))  # a decision, by its number
        and not path.startswith("bench/results")
    }
    assert not missing


def test_every_example_that_a_page_shows_is_run_by_a_test_of_its_own() -> None:
    shown = {path for page in pages() for path in re.findall(r"<!-- made: example (\S+) -->", page.read_text())}
    said = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(shown) >= 7
    for path in shown:
        assert (ROOT / path).is_file() and Path(path).stem in said, path


# --- what is made from the code ------------------------------------------------------------------------------------


def test_the_settings_page_has_every_setting_with_its_default_and_every_switch() -> None:
    page = docs_reference.settings()
    for key, field in Settings.model_fields.items():
        if key.endswith("_settings"):
            continue
        row = next(line for line in page.splitlines() if f"`{key}` |" in line)
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert ("| unset |" if default in (None, "") else f"| `{default}` |") in row, row
        choices = [v for v in get_args(field.annotation) if isinstance(v, str)]
        assert all(f"`{choice}`" in row for choice in choices), row
    assert all(bare in page for bare, _ in SWITCHES.values())
    assert "| whole number, 1 to 2<sup>20</sup> |" in page  # of rows
    assert "| number, above 0 to 2,592,000 |" in page  # of deadlines


def test_the_command_page_has_every_command_and_every_option() -> None:
    page = docs_reference.commands()
    parsers = docs_reference.all_parsers()
    assert {name.split()[0] for name in parsers} == set(COMMANDS)
    of_settings = {"--" + key.replace("_", "-") for key in (*Settings.model_fields, *SWITCHES)}
    for name, parser in parsers.items():
        section = page.split(f"\n## shmstage {name}\n")[1].split("\n## ")[0]
        for action in docs_reference.options_of(parser):
            if not set(action.option_strings) & of_settings:
                for shown in action.option_strings or [str(action.metavar or action.dest)]:
                    assert f"`{shown}" in section, (name, shown)


def test_every_error_is_explained_with_its_code() -> None:
    page = docs_reference.error_classes()
    for name, cls in errors.by_name().items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"Exit code {cls.exit_code}" in section and len(section) > 100
    codes = docs_reference.exit_codes()
    assert re.search(r"\*\*6\*\*: .*PeerLostError", codes) and re.search(r"\*\*2\*\*: .*BudgetError", codes)


def test_an_error_without_a_remedy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    known = errors.by_name()
    monkeypatch.setattr(docs_reference.errors, "by_name", lambda: {**known, "NewError": errors.InputError})
    with pytest.raises(ValueError, match="NewError"):
        docs_reference.error_classes()


def test_exit_codes_in_the_table_of_the_errors_page_are_those_of_the_code() -> None:
    page = (DOCS / "operate" / "errors.md").read_text()
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert told == {0, 1, 3, 4} | {cls.exit_code for cls in errors.by_name().values()}


# --- the boundary's pictures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_picture_is_of_the_commands_that_the_order_is_to_have(mode: Boundary) -> None:
    drawn = [docs_boundary.what(span.command) for span in drawn_run(mode).calls() if span.command]
    expected = expected_calls(mode, microbatches=[3] * 4, microbatches_per_step=3, checkpoint_every=1, weight_sync=True)
    assert ["save_checkpoint 0", "prepare_weight_sync 0", *drawn] == expected
    numbered = re.findall(r"^\d+\. `?([^:`]+)`?:", docs_boundary.picture(mode), re.MULTILINE)
    of_boundary = [what for what in numbered if what != "bookkeeping"]
    at = expected.index(of_boundary[0])
    assert expected[at : at + len(of_boundary)] == of_boundary
    assert numbered.count("bookkeeping") == 1 and any(re.match(r"fwd_bwd(_staged)? 3\.0", what) for what in numbered)


def test_each_order_hides_more_than_the_one_before_it() -> None:
    idle = [sum(b - a for a, b in drawn_run(mode).idle[docs_boundary.STEP]) for mode in BOUNDARIES]
    assert idle == sorted(idle, reverse=True) and len(set(idle)) == len(idle)


def test_in_the_pictures_nothing_is_done_before_what_it_needs() -> None:
    for mode in BOUNDARIES:
        drawing = drawn_run(mode)
        at: dict[tuple[str, str], Any] = {(span.lane, span.label): span for span in drawing.spans}
        for (lane, label), span in at.items():
            if lane == "device" and "." in label:
                assert at["packer", label].end <= at["uploads", label].begin
                assert at["uploads", label].end <= span.begin
        device = sorted((span for span in drawing.spans if span.lane == "device"), key=lambda span: span.begin)
        assert all(one.end <= two.begin for one, two in pairwise(device))


# --- plots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", docs_charts.CHARTS)
def test_a_plot_draws_what_its_file_says_and_says_what_made_it(name: str) -> None:
    drawn = docs_charts.chart(name)
    file, _, bars, _ = docs_charts.CHARTS[name]
    result = docs_charts.kept(file)
    assert result["command"].split()[1] in drawn and result["revision"] in drawn
    assert drawn.count("<rect") == len(list(bars(result))) > 1
    kept = set(numbers_in(result["figures"]))
    assert {bar[1] for bar in bars(result)} <= kept, "a bar that no figure of the file gives"
    longest = max(bars(result), key=lambda bar: bar[1])
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths.index(max(widths)) == [bar[0] for bar in bars(result)].index(longest[0])


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers_in(each)
    elif isinstance(value, int | float):
        yield value


def test_every_kept_result_is_drawn() -> None:
    kept = {path.stem for path in docs_charts.KEPT.glob("*.json")}
    assert kept == {file for file, *_ in docs_charts.CHARTS.values()}
