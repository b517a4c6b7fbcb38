from __future__ import annotations

import pytest
from skipping import skip_unless_ci


def test_what_is_skipped_on_a_desk_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that lost its root would else pass with half of the cases untried."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        skip_unless_ci("needs root")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not to be skipped in CI: needs root"):
        skip_unless_ci("needs root")
