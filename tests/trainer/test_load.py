from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shmstage.errors import BudgetError, MissingExtraError, PluginError, ShmstageError
from shmstage.testing.engines import make_toy_engine
from shmstage.trainer.load import load_engine

HERE = "trainer.broken_engines"


@pytest.mark.slow
def test_the_factory_gets_its_settings_and_the_checkpoint_directory(tmp_path: Path) -> None:
    engine = load_engine("shmstage.testing.engines:make_toy_engine", {"tokens": 8}, tmp_path)
    assert engine.weights()["w"].shape == (8,)
    assert make_toy_engine.__doc__ is not None
    assert "checkpoint_dir" in make_toy_engine.__doc__


def test_the_working_directory_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "my_plugin_of_this_test"
    (tmp_path / f"{name}.py").write_text(
        "def make(settings):\n    import shmstage.errors as e\n    raise e.BudgetError(str(sorted(settings)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with pytest.raises(BudgetError, match=r"\['a', 'checkpoint_dir'\]"):
        load_engine(f"{name}:make", {"a": 1})
    del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("no_colon", PluginError, "'no_colon' is not of the form module:factory"),
        ("nowhere.at_all:make", PluginError, "no module named 'nowhere'"),
        (f"{HERE}:missing", PluginError, "has no 'missing'; functions there: "),
        (f"{HERE}:not_callable", PluginError, "not_callable is a int"),
        (f"{HERE}:raises", PluginError, r"raised KeyError: 'width'; called with settings \['checkpoint_dir', 'width"),
        (f"{HERE}:refuses", BudgetError, "use width = 100"),
        (f"{HERE}:returns_little", PluginError, "HalfAnEngine, which has no shardings, update, metrics"),
        (f"{HERE}:lacks_optax", MissingExtraError, r"pip install 'shmstage\[train\]'"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_clear_error(name: str, kind: type[ShmstageError], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        load_engine(name, {"width": 3})
    assert caught.value.exit_code == 2
