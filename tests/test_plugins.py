"""A plug-in that cannot be used is bad input, said in one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from shmstage.errors import MissingExtraError, PluginError, SettingsError
from shmstage.plugins import make

MODULE = """
from shmstage.errors import SettingsError
class Good:
    def groups(self, cursor): return iter(())
def good(settings): return Good()
def empty(settings): return object()
def broken(settings): raise ValueError("no data")
def refusing(settings): raise SettingsError("lr = -1: must be positive")
def lacking(settings): import optax_that_is_not_here
def lacking_extra(settings): raise ModuleNotFoundError("x", name="orbax.checkpoint")
number = 3
unset = None
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin.py").write_text(MODULE)
    (tmp_path / "c_plugin.py").write_text("from pathlib import Path\ndef _hidden(settings): ...\n")
    (tmp_path / "b_plugin.py").write_text("raise RuntimeError('at import')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in ("a_plugin", "c_plugin", "many_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("plugin")
def test_the_working_directory_is_importable() -> None:
    assert type(make("source", "a_plugin:good", {}, needs=("groups",))).__name__ == "Good"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nothing", PluginError, "not of the form module:factory"),
        ("a_plugin:", PluginError, "not of the form module:factory"),
        ("no_such_thing:make", PluginError, "no module named 'no_such_thing'; it is looked for in"),
        ("b_plugin:make", PluginError, "importing b_plugin raised RuntimeError: at import"),
        ("a_plugin:none", PluginError, "a_plugin has no 'none'; functions there: Good, good, empty, broken, ref"),
        ("c_plugin:none", PluginError, "c_plugin has no 'none'; there is no function there"),
        ("a_plugin:unset", PluginError, "a_plugin.unset is a NoneType, not a function"),
        ("a_plugin:number", PluginError, "is a int, not a function"),
        ("a_plugin:empty", PluginError, "returned object, which has no groups"),
        ("a_plugin:broken", PluginError, r"raised ValueError: no data; called with settings \['lr'\]"),
        ("a_plugin:refusing", SettingsError, "lr = -1"),
        ("a_plugin:lacking", PluginError, "no module named 'optax_that_is_not_here'"),
        ("a_plugin:lacking_extra", MissingExtraError, r"needs orbax; pip install 'shmstage\[train\]'"),
    ],
)
def test_what_is_wrong_is_said(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make("source", name, {"lr": 1}, needs=("groups",))


@pytest.mark.usefixtures("plugin")
def test_of_many_functions_a_few_are_named(tmp_path: Path) -> None:
    (tmp_path / "many_plugin.py").write_text("".join(f"def f{i}{'x' * 500}(settings): ...\n" for i in range(100)))
    with pytest.raises(PluginError, match=re.escape("... and 92 more")) as caught:
        make("source", "many_plugin:f", {}, needs=())
    assert len(str(caught.value)) < 500
