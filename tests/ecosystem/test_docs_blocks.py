"""Every code block of README and docs is run, in order, page by page, in a directory of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_blocks import DOCS, README, Block, blocks_of, kind_of, run_page

from shmstage.packing.bundle import read_bundle

WRITE_ROLLOUTS = """
import json
from my_source import make_source
with open("rollouts.jsonl", "w") as file:
    for group in make_source({}).groups(0):
        for t in group.trajectories:
            print(json.dumps({"tokens": t.tokens.tolist(), "loss_mask": t.loss_mask.tolist(), "advantages": 1.0,
                              "old_logprobs": t.old_logprobs.tolist(), "group_id": t.group_id}), file=file)
"""
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
def test_the_loss_the_source_and_the_hooks_of_the_readme_train(tmp_path: Path, compiled: Path) -> None:
    files = {block.title: block for block in blocks_of(README) if block.title}
    assert set(files) == {"my_hooks.py", "my_loss.py", "run.toml", "my_source.py", "routed.toml"}
    # what its source gives is what its import reads; the rest as it stands there, smaller
    write = Block(README, 0, "python", WRITE_ROLLOUTS, "", "")
    table = '[hooks]\nfactory = "my_hooks:make"\ntarget = 0.05\n'
    assert all(line in files["my_hooks.py"].text for line in ("[hooks]", 'factory = "my_hooks:make"', "target = 0.05"))
    run = Block(README, 0, "bash", "shmstage bundle import rollouts.jsonl my-bundle\nshmstage run --config run.toml "
                "--rows 2 --steps 2 --microbatches-per-step 2 --checkpoint-every 1 --out runs/mine", "", "")
    blocks = [files["my_hooks.py"], files["my_loss.py"], files["my_source.py"], files["run.toml"], write]
    problems = run_page(blocks, tmp_path, compiled)
    with (tmp_path / "run.toml").open("a") as file:
        file.write(table)
    problems += run_page([run], tmp_path, compiled)
    assert not problems, "\n".join(problems)
    assert len(read_bundle(tmp_path / "my-bundle").trajectories) == 100
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_producer_and_consumer_of_the_readme_meet(tmp_path: Path, compiled: Path) -> None:
    one, another = [b for b in blocks_of(README) if b.kind == "python" and "# one process" in b.text], [
        b for b in blocks_of(README) if b.kind == "python" and "# another process" in b.text]  # fmt: skip
    assert len(one) == len(another) == 1
    (tmp_path / "one.py").write_text(one[0].text)
    (tmp_path / "another.py").write_text(another[0].text)
    both = Block(README, one[0].line, "bash", "python one.py &\npython another.py\nwait $!", "", "")
    problems = run_page([both], tmp_path, compiled)
    assert not problems, "\n".join(problems)


def test_every_python_block_of_the_readme_is_run_here() -> None:
    found = [b for b in blocks_of(README) if b.kind == "python"]
    assert all(b.title or "# one process" in b.text or "# another process" in b.text for b in found)
