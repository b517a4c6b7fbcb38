"""What a test does where it cannot be run."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_unless_ci(reason: str) -> NoReturn:
    """Skips on a desk and fails where ``CI`` is set: a line of cases that nobody ever runs is not covered.

    For what a CI container has or can be given: root, namespaces, a compiler. What depends on the kernel of the
    machine below it is skipped with ``pytest.skip``.
    """
    if os.environ.get("CI"):
        pytest.fail(f"this test is not to be skipped in CI: {reason}")
    pytest.skip(reason)
