"""A setting has one name and one value; where it came from is known; what contradicts is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmstage.errors import SettingsError
from shmstage.settings import BOUNDARIES, WANTED, Settings, resolve

#: folders of this project that may name a variable
PARTS = ("shmstage", "tests", "bench", "examples", "docs", "native", ".ci")


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
    ("name", "hint"),
    [
        ("SHMSTAGE_ROWZ", "did you mean SHMSTAGE_ROWS"),
        ("SHMSTAGE_rows", "did you mean SHMSTAGE_ROWS"),
        ("SHMSTAGE_STAGE_BEFOR_UPDATE", "did you mean SHMSTAGE_STAGE_BEFORE_UPDATE"),
        ("SHMSTAGE_METRIC_PORT", "did you mean SHMSTAGE_METRICS_PORT"),
        ("SHMSTAGE_", "no setting is called so"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=rf"unknown variable \${name}; {hint}"):
        resolve({}, {name: "3"})


def test_every_variable_that_this_project_sets_or_reads_is_let_pass() -> None:
    root = Path(__file__).parents[1]
    said: set[str] = set()
    for path in (*root.iterdir(), *(path for part in PARTS for path in (root / part).rglob("*"))):
        if path.name in ("Makefile", "run") or path.suffix in (".py", ".md", ".toml", ".yaml", ".sh", ".sbatch"):
            said |= {*re.findall(r"\bSHMSTAGE_[A-Z_]*[A-Z]\b", path.read_text())} if path != Path(__file__) else set()
    assert {"SHMSTAGE_SANITIZE", "SHMSTAGE_ROWS"} <= said
    resolve({}, dict.fromkeys(said - {"SHMSTAGE_ROWZ"}, "8"))


def test_what_kubernetes_says_of_a_service_with_our_name_is_no_misspelt_setting() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_9100_TCP", "PORT_9100_TCP_ADDR")
    links = {f"SHMSTAGE_{of}{name}": "10.0.0.7" for of in ("", "ROLLOUT_STORE_") for name in names}
    resolve({}, {**links, "SHMSTAGE_ROLLOUT_STORE_PORT": "tcp://10.0.0.7:9100"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('rows = "8"', "rows = '8' .*: must be a number, without quotes"),
        ('steps = "8"', "steps = '8' .*: must be a number, without quotes"),
        ('sampler_is_cap = "2.5"', "must be a number, without quotes"),
        ('metrics_port = "9100"', "must be a number, without quotes"),
        ("rows = true", "rows = True .*: must be a number$"),
        ('latch = "false"', "must be true or false, without quotes"),
        ('stage_before_update = "false"', "must be true or false, without quotes"),
    ],
)
def test_in_a_file_a_text_is_no_number(tmp_path: Path, text: str, said: str) -> None:
    """Flags and variables are all texts; TOML has types."""
    with pytest.raises(SettingsError, match=said):
        resolve({}, {}, toml(tmp_path, text))


def test_a_file_says_texts_numbers_and_switches_in_their_own_types(tmp_path: Path) -> None:
    file = toml(tmp_path, 'rows = 8\nsampler_is_cap = 3\nlatch = false\nmetrics_port = "off"\nout = "x"\nrun = "8"\n')
    settings = resolve({}, {}, file).settings
    assert (settings.rows, settings.sampler_is_cap, settings.latch, settings.metrics_port) == (8, 3.0, False, "off")
    assert (settings.out, settings.run) == (Path("x"), "8")


@pytest.mark.parametrize(
    ("key", "value"),
    [("slots", "1"), ("rows", "0"), ("rows", "many"), ("tokens", "1"), ("steps", "0"), ("boundary", "fast"),
     ("device_buffers", "1"), ("verify", "maybe"), ("passes", "-1"), ("call_timeout_s", "inf"),
     ("stop_grace_s", "nan"), ("slot_timeout_s", "1e300"), ("run", "a/b"), ("run", "x" * 65), ("metrics_host", "")],
)  # fmt: skip
def test_a_bad_value_is_named_with_value_and_limit(key: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({key: value}, {})
    said = str(caught.value)
    assert said.startswith(f"{key} = {value!r} (--{key.replace('_', '-')}): ")
    assert "must be" in said or "valid" in said


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
    said = rf"metrics_port = '{port}' \(\$SHMSTAGE_METRICS_PORT\): must be a port, 0 to 65535, or off$"
    with pytest.raises(SettingsError, match=said):
        resolve({}, {"SHMSTAGE_METRICS_PORT": port})


def test_steps_to_profile_are_a_first_and_a_last_one() -> None:
    assert resolve({"profile_steps": "3:5"}, {}).settings.profile_range == (3, 5)
    assert resolve({"profile_steps": "7:7"}, {}).settings.profile_range == (7, 7)
    assert resolve({}, {}).settings.profile_range is None


@pytest.mark.parametrize("steps", ["5:3", "0:3", "3", "3:", "a:b", "3:5:7", "-1:2", "1:2\n"])
def test_what_is_no_range_of_steps_is_refused(steps: str) -> None:
    with pytest.raises(SettingsError, match="profile_steps = .*FROM:TO"):
        resolve({"profile_steps": steps}, {})


def test_a_text_with_a_pattern_is_asked_for_in_words_and_no_pattern_is_shown() -> None:
    for key, field in Settings.model_fields.items():
        if any(getattr(each, "pattern", None) for each in field.metadata):
            with pytest.raises(SettingsError) as caught:
                resolve({key: "a/b"}, {})
            assert str(caught.value).endswith(f"must be {WANTED[key][1]}")


@pytest.mark.parametrize("key", ["engine", "source", "hooks"])
def test_a_plug_in_without_a_function_is_refused_before_anything_starts(key: str, tmp_path: Path) -> None:
    for name in ("my_loss", "my_loss:", ":make", "my/loss.py:make", "my_loss:a.b", "a:b:c"):
        with pytest.raises(SettingsError, match=rf"{key} = '{name}' \(--{key}\): must be module:factory, for example"):
            resolve({key: name}, {})
    with pytest.raises(SettingsError, match=f"{key} = 'my_loss' .file .*: must be module:factory"):
        resolve({}, {}, toml(tmp_path, f'[{key}]\nfactory = "my_loss"\n'))
    assert resolve({key: "my-package.rl:make_it"}, {}).settings.engine in ("", "my-package.rl:make_it")


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
