from __future__ import annotations

import shutil
from pathlib import Path

from shmstage.launch.processes import Child


def test_the_end_of_a_child_is_told_although_its_output_directory_was_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    child = Child("no_such_role", [], out / "no_such_role.log")
    assert child.wait(60) == 1
    shutil.rmtree(out)
    assert child.describe_end() == (
        f"ended with exit code 1; {out} is not there any more: do not move or remove OUT while a run writes into it; "
        f"see {out}/no_such_role.log"
    )
    child.end(1.0)
