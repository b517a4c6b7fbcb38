"""Every code block of README and docs is run, in order, page by page, in a directory of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_blocks import DOCS, README, Block, blocks_of, kind_of, run_page

from shmstage.packing.bundle import read_bundle

#: pages with something to run; the others have blocks that are only checked, or none
PAGES = (
    "quickstart.md", "models.md", "inputs.md", "transport.md", "operate/guide.md", "operate/errors.md",
    "operate/resume.md", "operate/watching.md", "reference/settings.md",
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs are kept once they are compiled: most of a run's time would go into compiling the same."""
    return tmp_path_factory.mktemp("compiled")


def runs_something(blocks: list[Block]) -> bool:
    kinds = {kind_of(b) for b in blocks if not b.not_run and not (b.title and b.kind == "python")}
    return bool(kinds & {"bash", "python"})


def test_every_page_with_something_to_run_is_run_here() -> None:
    found = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if runs_something(blocks_of(page))}
    assert found == set(PAGES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, compiled: Path) -> None:
    problems = run_page(blocks_of(DOCS / page), tmp_path, compiled)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_a_page_with_a_wrong_block_fails(tmp_path: Path, compiled: Path) -> None:
    page = tmp_path / "page.md"
    for kind, text in (("python", "assert False"), ("bash", "shmstage run --rows 0\ntrue"), ("bash", "false | true")):
        page.write_text(f"```{kind}\n{text}\n```\n")
        assert len(run_page(blocks_of(page), tmp_path, compiled)) == 1, text


# --- README: its commands are for a whole machine and are only checked; its programs are run -----------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_and_the_data_of_the_readme_train_with_the_commands_that_stand_there(
    tmp_path: Path, compiled: Path
) -> None:
    blocks = blocks_of(README)
    files = {block.title: block for block in blocks if block.title}
    assert set(files) == {"my_loss.py", "write_rollouts.py", "run.toml"}
    commands = next(block for block in blocks if "python write_rollouts.py" in block.text)
    # tests/launch/test_compare.py compares
    lines = [line for line in commands.text.splitlines() if "compare" not in line]
    assert len(lines) == 4
    run = Block(README, commands.line, "bash", "\n".join(lines), "", "")
    problems = run_page([*files.values(), run], tmp_path, compiled)
    assert not problems, "\n".join(problems)
    assert len(read_bundle(tmp_path / "my-bundle").trajectories) == 32
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/mine/steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_misspelled_key_of_the_engine_of_the_readme_is_refused(tmp_path: Path, compiled: Path) -> None:
    files = {block.title: block for block in blocks_of(README) if block.title}
    use = Block(README, 0, "python", "from my_loss import make_engine\nmake_engine({'learnin_rate': 1})", "", "")
    (problem,) = run_page([files["my_loss.py"], use], tmp_path, compiled)
    assert "ValueError: [engine] has keys that nobody reads: learnin_rate" in problem


@pytest.mark.slow
def test_producer_and_consumer_of_the_readme_meet(tmp_path: Path, compiled: Path) -> None:
    one, another = [b for b in blocks_of(README) if b.kind == "python" and "# one process" in b.text], [
        b for b in blocks_of(README) if b.kind == "python" and "# another process" in b.text]  # fmt: skip
    assert len(one) == len(another) == 1
    (tmp_path / "one.py").write_text(one[0].text)
    (tmp_path / "another.py").write_text(another[0].text)
    for first, second in (("one.py", "another.py"), ("another.py", "one.py")):  # "in either order"
        both = Block(README, one[0].line, "bash", f"python {first} &\npython {second}\nwait $!", "", "")
        problems = run_page([both], tmp_path, compiled)
        assert not problems, "\n".join(problems)


def test_every_python_block_of_the_readme_is_run_here() -> None:
    found = [b for b in blocks_of(README) if b.kind == "python"]
    assert all(b.title or "# one process" in b.text or "# another process" in b.text for b in found)
