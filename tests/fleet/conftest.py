"""The rig's assertions explain themselves as those of a test do; its programs are compiled before the first test."""

import pytest

pytest.register_assert_rewrite("fleet.rig", "doubles.rig")


@pytest.fixture(scope="session", autouse=True)
def compiled_programs() -> None:
    from doubles.rig import Case, reference

    reference(Case(mode="serial"))
