"""A setting has one name and one value; where it came from is known; what contradicts is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmstage.errors import SettingsError
from shmstage.settings import BOUNDARIES, Settings, resolve


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_designs() -> None:
    settings = resolve({}, {}).settings
    shape = (settings.rows, settings.tokens, settings.microbatches_per_step, settings.step_cap)
    assert shape == (4, 256, 3, 12)
    assert (settings.slots, settings.aux_slots, settings.device_buffers, settings.checkpoint_every) == (3, 1, 2, 0)
    assert (settings.boundary, settings.steps, settings.passes) == ("serial", None, None)


def test_passes_alone_means_no_step_cap_and_both_keep_the_cap() -> None:
    assert resolve({"passes": "2"}, {}).settings.step_cap is None
    assert resolve({"passes": "2", "steps": "3"}, {}).settings.step_cap == 3


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "rows = 1\ntokens = 10\nslots = 5\n")
    got = resolve({"rows": "3"}, {"SHMSTAGE_ROWS": "2", "SHMSTAGE_TOKENS": "20"}, file)
    assert (got.settings.rows, got.settings.tokens, got.settings.slots) == (3, 20, 5)
    assert [got.origins[k] for k in ("rows", "tokens", "slots", "steps")] == [
        "--rows",
        "$SHMSTAGE_TOKENS",
        f"file {file}",
        "default",
    ]


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "serial"),
        ({"pipeline_step_boundary": True}, "pipelined"),
        ({"pipeline_step_boundary": True, "stage_next_microbatch": True}, "staged_before_update"),
        (
            {"pipeline_step_boundary": True, "stage_next_microbatch": True, "stage_before_update": False},
            "staged_after_update",
        ),
        ({"stage_before_update": True}, "serial"),
    ],
)
def test_the_three_switches_are_another_spelling_of_boundary(flags: dict[str, bool], mode: str) -> None:
    assert resolve(flags, {}).settings.boundary == mode


def test_the_bare_variables_of_the_reference_work() -> None:
    environment = {"PIPELINE_STEP_BOUNDARY": "true", "STAGE_NEXT_MICROBATCH": "1", "STAGE_BEFORE_UPDATE": "false"}
    assert resolve({}, environment).settings.boundary == "staged_after_update"


def test_staging_without_pipelining_is_refused() -> None:
    with pytest.raises(SettingsError, match="needs pipeline_step_boundary; add --pipeline-step-boundary"):
        resolve({"stage_next_microbatch": True}, {})


def test_a_flag_of_one_spelling_beats_the_file_in_the_other(tmp_path: Path) -> None:
    file = toml(tmp_path, 'boundary = "pipelined"\n')
    assert resolve({"pipeline_step_boundary": False}, {}, file).settings.boundary == "serial"
    assert resolve({"boundary": "serial"}, {"PIPELINE_STEP_BOUNDARY": "1"}).settings.boundary == "serial"


@pytest.mark.parametrize(
    ("boundary", "switch", "value"),
    [
        ("serial", "pipeline_step_boundary", True),
        ("pipelined", "pipeline_step_boundary", False),
        ("pipelined", "stage_next_microbatch", True),
        ("staged_after_update", "stage_before_update", True),
    ],
)
def test_contradicting_spellings_of_one_level_are_refused(boundary: str, switch: str, value: bool) -> None:
    with pytest.raises(SettingsError, match=f"boundary = {boundary} .* contradicts {switch}"):
        resolve({"boundary": boundary, switch: value}, {})


def test_spellings_that_agree_are_accepted_together() -> None:
    flags = {"boundary": "staged_before_update", "pipeline_step_boundary": True, "stage_before_update": True}
    assert resolve(flags, {}).settings.boundary == "staged_before_update"
    assert resolve({"boundary": "serial", "stage_before_update": False}, {}).settings.boundary == "serial"


@pytest.mark.parametrize(
    ("flags", "environment", "mode"),
    [
        ({}, {"STAGE_BEFORE_UPDATE": "1"}, "staged_before_update"),
        ({"stage_before_update": False}, {}, "staged_after_update"),
        ({"stage_next_microbatch": False}, {}, "pipelined"),
        ({"stage_next_microbatch": False, "pipeline_step_boundary": False}, {}, "serial"),
    ],
)
def test_a_switch_changes_its_own_part_of_a_boundary_named_below_it(
    flags: dict[str, bool], environment: dict[str, str], mode: str, tmp_path: Path
) -> None:
    file = toml(tmp_path, 'boundary = "staged_before_update"\n')
    assert resolve(flags, environment, file).settings.boundary == mode


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown setting row = 4 .* did you mean rows"):
        resolve({}, {}, toml(tmp_path, "row = 4\n"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("slots", "1"), ("rows", "0"), ("rows", "many"), ("tokens", "1"), ("steps", "0"), ("boundary", "fast"),
     ("device_buffers", "1"), ("verify", "maybe"), ("passes", "-1"), ("call_timeout_s", "inf"),
     ("stop_grace_s", "nan"), ("slot_timeout_s", "1e300"), ("run", "a/b")],
)  # fmt: skip
def test_a_bad_value_is_named_with_value_and_limit(key: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({key: value}, {})
    said = str(caught.value)
    assert said.startswith(f"{key} = {value!r} (--{key.replace('_', '-')}): ")
    assert "must be" in said or "valid" in said or "should match" in said


def test_engine_and_source_tables_carry_their_factory_and_settings(tmp_path: Path) -> None:
    file = toml(tmp_path, 'source = "a:b"\n[engine]\nfactory = "m:f"\nlr = 0.1\n')
    settings = resolve({}, {}, file).settings
    assert (settings.engine, settings.engine_settings, settings.source) == ("m:f", {"lr": 0.1}, "a:b")
    assert resolve({"engine": "x:y"}, {}, file).settings.engine == "x:y"


def test_broken_and_missing_files_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not valid TOML"):
        resolve({}, {}, toml(tmp_path, "rows = = 1"))
    with pytest.raises(SettingsError, match="No such file"):
        resolve({}, {}, tmp_path / "none.toml")


def test_settings_survive_the_way_to_a_child_process() -> None:
    settings = resolve({"steps": "7", "out": "x"}, {}).settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_every_boundary_mode_can_be_named() -> None:
    assert [resolve({"boundary": mode}, {}).settings.boundary for mode in BOUNDARIES] == list(BOUNDARIES)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"eval_every": "2"}, "eval_every = 2 needs an eval_bundle"),
        ({"eval_every": "2", "eval_bundle": "b", "aux_slots": "0"}, "needs aux_slots of at least 1; aux_slots = 0"),
    ],
)
def test_an_evaluation_that_cannot_take_place_is_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve(flags, {})


def test_the_hooks_table_names_its_factory_and_holds_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[hooks]\nfactory = "m:make"\nurl = "x"\n')
    settings = resolve({}, {}, file).settings
    assert (settings.hooks, settings.hooks_settings) == ("m:make", {"url": "x"})


@pytest.mark.parametrize(("given", "port"), [("off", "off"), ("0", 0), ("9100", 9100), (9100, 9100)])
def test_metrics_are_off_or_have_a_port_and_0_is_a_port(given: object, port: object) -> None:
    assert resolve({"metrics_port": given}, {}).settings.metrics_port == port
    assert resolve({}, {}).settings.metrics_port == "off"
    assert Settings.model_validate_json(Settings(metrics_port=port).model_dump_json()).metrics_port == port  # type: ignore[arg-type]


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(SettingsError, match=rf"metrics_port = '{port}' \(\$SHMSTAGE_METRICS_PORT\): must be"):
        resolve({}, {"SHMSTAGE_METRICS_PORT": port})


def test_steps_to_profile_are_a_first_and_a_last_one() -> None:
    assert resolve({"profile_steps": "3:5"}, {}).settings.profile_range == (3, 5)
    assert resolve({"profile_steps": "7:7"}, {}).settings.profile_range == (7, 7)
    assert resolve({}, {}).settings.profile_range is None


@pytest.mark.parametrize("steps", ["5:3", "0:3", "3", "3:", "a:b", "3:5:7", "-1:2", "1:2\n"])
def test_what_is_no_range_of_steps_is_refused(steps: str) -> None:
    with pytest.raises(SettingsError, match="profile_steps = "):
        resolve({"profile_steps": steps}, {})


def test_steps_to_record_need_a_place_and_a_place_needs_steps() -> None:
    both = resolve({"record": "d", "record_steps": "3:5"}, {}).settings
    assert (both.record, both.record_range) == (Path("d"), (3, 5))
    with pytest.raises(SettingsError, match="record = d needs record_steps; give both, or neither"):
        resolve({"record": "d"}, {})
    with pytest.raises(SettingsError, match="record_steps = 3:5 needs record; give both, or neither"):
        resolve({"record_steps": "3:5"}, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"record_steps": "5:3"}, "record_steps = 5:3 ends before it begins"),
        ({"record_steps": "12:13"}, "record_steps = 12:13 ends after the last step, steps = 12"),
        ({"record_steps": "3:9", "steps": 8}, "record_steps = 3:9 ends after the last step, steps = 8"),
        ({"record_steps": "0:1"}, "record_steps = '0:1'"),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve({"record": "d", **given}, {})
    assert resolve({"record": "d", "record_steps": "12:13", "passes": 2}, {}).settings.record_range == (12, 13)
