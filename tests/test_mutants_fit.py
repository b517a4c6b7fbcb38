"""`make mutants` is no part of CI; that its texts still stand in the sources is seen here, at no cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: in a process of its own: the modules there have names that others have, too
LIST = "import json, run; print(json.dumps([[m.name, m.file, m.old, m.tests] for m in run.catalogue()]))"


def test_what_a_mutant_changes_stands_in_its_file_once_and_its_tests_exist() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", LIST],
        cwd=ROOT / "tests" / "mutants",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    mutants = json.loads(listed.stdout)
    assert len(mutants) > 300
    for mutant, file, old, tests in mutants:
        assert (ROOT / file).read_text().count(old) == 1, f"{mutant}: {file}"
        for named in tests:
            module, _, test = named.partition("::")
            name = test.rpartition("::")[2].partition("[")[0]
            assert f"def {name}(" in (ROOT / module).read_text(), f"{mutant}: {named}"
