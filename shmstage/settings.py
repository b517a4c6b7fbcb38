"""Every setting, declared once and checked once; where its value came from is kept beside it.

A setting has one name: the TOML key ``rows``, the flag ``--rows`` and the variable ``SHMSTAGE_ROWS`` are the same
thing. A flag beats the environment, the environment beats the file, the file beats the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shmstage.errors import SettingsError, named, shown
from shmstage.settings_origins import TABLES, check_variables, read_settings_file
from shmstage.tables import MAX_TEXT_CHARACTERS, check_table, is_line

Boundary = Literal["serial", "pipelined", "staged_after_update", "staged_before_update"]
BOUNDARIES: tuple[Boundary, ...] = ("serial", "pipelined", "staged_after_update", "staged_before_update")

WeightSync = Literal["off", "async", "sync"]

RoutingEncoding = Literal["dense", "ragged", "ragged_packed"]
ROUTING_ENCODINGS: tuple[RoutingEncoding, ...] = ("dense", "ragged", "ragged_packed")
#: expert ids are int16, and -1 means unset
MAX_EXPERTS = 1 << 15

DEFAULT_STEPS = 12
#: longest deadline, 30 days in seconds
MAX_WAIT_S = 30 * 86400.0
#: largest count of anything: exact in every JSON reader
MAX_COUNT = 2**53
#: a run id goes into the pool's header
MAX_RUN_NBYTES = 127
LEVELS = ("default", "file", "environment", "flag")

_PLUGIN = r"^([^:/]+:\w+)?$"
_STEPS = r"^([1-9]\d{0,14}:[1-9]\d{0,14})?$"
#: where pydantic would show a pattern, or half of a choice: the placeholder in --help, and what an error asks for
WANTED = {
    "run": ("ID", "at most 64 letters, digits, '_', '.' or '-'"),
    **dict.fromkeys(
        ("source", "engine", "hooks"), ("MODULE:FACTORY", "module:factory, for example my_package.rl:make")
    ),
    "metrics_port": ("PORT", "a port, 0 to 65535, or off"),
    "metrics_host": ("ADDRESS", "an address, for example 127.0.0.1"),
    **dict.fromkeys(("profile_steps", "record_steps"), ("FROM:TO", "FROM:TO, for example 3:5; the first step is 1")),
}


class Settings(BaseModel):
    """What a run is told. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run: str = Field("", max_length=64, pattern=r"^[\w.-]*$", description="run id; empty: made from the time")
    out: Path | None = Field(None, description="output directory; unset: runs/<run>")
    bundle: Path | None = Field(None, description="directory of a bundle to train; unset: the demo bundle")
    source: str = Field(
        "", pattern=_PLUGIN, description="where trajectories come from, as module:factory; settings in [source]"
    )
    engine: str = Field("", pattern=_PLUGIN, description="what trains, as module:factory; settings in [engine]")
    source_settings: dict[str, Any] = Field(default_factory=dict)
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    hooks: str = Field(
        "", pattern=_PLUGIN, description="who hears of checkpoints and steps, as module:factory; settings in [hooks]"
    )
    hooks_settings: dict[str, Any] = Field(default_factory=dict)

    boundary: Boundary = Field("serial", description="order of the commands at a step boundary")
    rows: int = Field(4, ge=1, le=1 << 20, description="rows of a micro-batch")
    tokens: int = Field(256, ge=2, le=1 << 24, description="tokens of a row")
    microbatches_per_step: int = Field(3, ge=1, le=1 << 20, description="micro-batches of one optimizer update")
    steps: int | None = Field(None, ge=1, le=MAX_COUNT, description="optimizer updates; input repeats to reach them")
    passes: int | None = Field(None, ge=1, le=MAX_COUNT, description="how often the input is run over")
    max_segments_per_row: int = Field(0, ge=0, le=MAX_COUNT, description="most trajectories in a row; 0: no limit")
    segment_align: int = Field(1, ge=1, le=MAX_COUNT, description="a segment starts at a multiple of this many tokens")
    max_real_tokens: int = Field(0, ge=0, le=MAX_COUNT, description="most real tokens in a micro-batch; 0: no limit")
    on_overlong: Literal["error", "drop"] = Field("error", description="trajectory longer than a row")
    order: Literal["arrival", "prompt_batch"] = Field("arrival", description="order in which groups are trained")
    routing_encoding: RoutingEncoding = Field(
        "dense", description="how routing lies in a slot: dense, ragged (real tokens only) or ragged_packed (few bits)"
    )
    experts: int = Field(
        0, ge=0, le=MAX_EXPERTS, description="experts that routing chooses from; 0: what the trajectories say"
    )
    max_held_bytes: int = Field(0, ge=0, le=MAX_COUNT, description="most bytes of trajectories held; 0: no limit")

    slots: int = Field(3, ge=2, le=4096, description="places for micro-batches in the pool")
    aux_slots: int = Field(1, ge=0, le=4096, description="places for evaluation and scoring, never for training")
    numa: Literal["default", "interleave"] = Field(
        "default", description="NUMA nodes of the pool; default: where first touched, interleave: spread over all"
    )
    host_register: Literal["auto", "off"] = Field(
        "auto", description="register the pool with the device runtime where there is one, so that devices read it"
    )
    device_buffers: int = Field(2, ge=2, le=64, description="micro-batches held on the device side")
    checkpoint_every: int = Field(
        0, ge=0, le=MAX_COUNT, description="steps between checkpoints; 0: only the one before step 1"
    )
    weight_sync: WeightSync = Field(
        "off", description="publish weights after every update; sync: the next step waits for it"
    )
    recompute_old_logps: bool = Field(False, description="score each micro-batch under the weights it is trained with")
    sampler_is_cap: float = Field(
        2.0, ge=1, description="cap of the importance weights that recompute_old_logps gives the sampler's tokens"
    )
    reference_logps: bool = Field(False, description="score each micro-batch under the reference policy")
    eval_bundle: Path | None = Field(None, description="directory of a bundle to evaluate on, never trained")
    eval_every: int = Field(0, ge=0, le=MAX_COUNT, description="steps between evaluations on eval_bundle; 0: none")
    latch: bool = Field(True, description="switch staging off while it does not pay, and probe again")
    latch_min_upload_s: float = Field(
        0.05, ge=0, description="boundaries with a shorter upload are not judged by the latch"
    )
    verify: Literal["digest", "full"] = Field("digest", description="full: also hash the arrays the engine gets")
    resume: bool = Field(False, description="continue from the newest checkpoint in OUT")
    events: Literal["on", "off"] = Field("on", description="write what happened when to OUT/events, for report")
    events_limit: int = Field(
        256_000_000, ge=100_000, le=MAX_COUNT, description="most bytes of events per process; the newest are kept"
    )

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = Field(
        "off", description="port of Prometheus metrics while the run goes on; 0: any free one, said in run.json"
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address that metrics_port is opened on")
    profile_steps: str = Field(
        "", pattern=_STEPS,
        description="steps that JAX profiles into OUT/profile, as FROM:TO, both included",
    )  # fmt: skip
    step_timing_log: bool = Field(False, description="one TRAINER_STEP_TIMING line per step in OUT/trainer.log")
    record: Path | None = Field(None, description="directory to make: a bundle of what record_steps are trained on")
    record_steps: str = Field(
        "", pattern=_STEPS,
        description="steps to record into the bundle record, as FROM:TO, both included",
    )  # fmt: skip

    stage_wait_s: float | None = Field(
        None,
        gt=0,
        le=MAX_WAIT_S,
        description="how long a planned stage waits for its micro-batch; unset: while the device computes",
    )
    start_timeout_s: float = Field(120.0, gt=0, le=MAX_WAIT_S, description="deadline for the trainer to come up")
    call_timeout_s: float = Field(600.0, gt=0, le=MAX_WAIT_S, description="deadline for one trainer command")
    slot_timeout_s: float = Field(600.0, gt=0, le=MAX_WAIT_S, description="deadline for a free slot")
    hook_timeout_s: float = Field(3600.0, gt=0, le=MAX_WAIT_S, description="deadline for on_checkpoint")
    max_restarts: int = Field(
        3, ge=0, le=MAX_COUNT, description="how often each child may be started again after it died"
    )
    restart_backoff_s: float = Field(1.0, ge=0, le=MAX_WAIT_S, description="wait before the first restart; doubles")
    stop_grace_s: float = Field(20.0, gt=0, le=MAX_WAIT_S, description="how long children may take to stop")

    @model_validator(mode="after")
    def _check_texts(self) -> Settings:
        if self.run.strip(".") != self.run and not self.run.strip("."):
            raise SettingsError(f"run = {self.run!r} names a directory that is there; give the run another id")
        if len(self.run.encode()) > MAX_RUN_NBYTES:
            raise SettingsError(
                f"run = {self.run!r} takes {len(self.run.encode())} bytes as UTF-8; the limit is {MAX_RUN_NBYTES}; "
                "give a shorter id"
            )
        for key, value in self:
            if isinstance(value, str | Path) and not is_line(str(value)):
                raise SettingsError(
                    f"{key} = {shown(str(value))} cannot be used; give UTF-8 text of at most {MAX_TEXT_CHARACTERS} "
                    "characters, without control characters"
                )
            if key in TABLES:
                check_table(TABLES[key], value)
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.eval_every and self.eval_bundle is None:
            raise SettingsError(f"eval_every = {self.eval_every} needs an eval_bundle to evaluate on")
        if self.eval_every and not self.aux_slots:
            raise SettingsError(f"eval_every = {self.eval_every} needs aux_slots of at least 1; aux_slots = 0")
        for key, steps in (("profile_steps", self.profile_range), ("record_steps", self.record_range)):
            if steps is not None and steps[0] > steps[1]:
                raise SettingsError(f"{key} = {steps[0]}:{steps[1]} ends before it begins; give FROM:TO")
        if (self.record is None) != (not self.record_steps):
            have, lack = ("record_steps", "record") if self.record is None else ("record", "record_steps")
            raise SettingsError(f"{have} = {getattr(self, have)} needs {lack}; give both, or neither")
        if self.record_range is not None and self.record_range[1] > (self.step_cap or MAX_COUNT):
            raise SettingsError(
                f"record_steps = {self.record_steps} ends after the last step, steps = {self.step_cap}; record earlier "
                "steps, or raise steps"
            )
        return self

    @property
    def step_cap(self) -> int | None:
        """Most steps of the run; ``None`` when only ``passes`` bounds it."""
        if self.steps is None and self.passes is None:
            return DEFAULT_STEPS
        return self.steps

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """First and last step to profile."""
        return _range(self.profile_steps)

    @property
    def record_range(self) -> tuple[int, int] | None:
        """First and last step to record."""
        return _range(self.record_steps)

    @property
    def out_dir(self) -> Path:
        """The output directory, absolute."""
        return (self.out or Path("runs") / self.run).absolute()


def _range(steps: str) -> tuple[int, int] | None:
    first, _, last = steps.partition(":")
    return (int(first), int(last)) if last else None


#: the reference's three switches: another spelling of ``boundary``
SWITCHES: dict[str, tuple[str, str]] = {
    "pipeline_step_boundary": (
        "PIPELINE_STEP_BOUNDARY",
        "pack and send the next step's first micro-batch without waiting for this step's bookkeeping",
    ),
    "stage_next_microbatch": ("STAGE_NEXT_MICROBATCH", "also upload it while the last micro-batch computes"),
    "stage_before_update": ("STAGE_BEFORE_UPDATE", "stage before the (deferred) update; on by default"),
}


@dataclass(frozen=True)
class Resolved:
    """Checked settings and, per key, where the value came from (``default``, ``file PATH``, ``$NAME``, ``--flag``).

    ``budget``: the file's table of that name as it stands there; a run has no use for it, `shmstage budget` reads it.
    """

    settings: Settings
    origins: Mapping[str, str]
    budget: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Given:
    value: Any
    level: int
    origin: str


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    *,
    before: Mapping[str, Any] | None = None,
    before_origin: str = "",
) -> Resolved:
    """Merge defaults, TOML file, environment and flags, and check the result.

    ``before`` are the settings of the run that is resumed: they stand in for the defaults. Raises ``SettingsError``
    naming key, value, limit and remedy.
    """
    given: dict[str, _Given] = {
        key: _Given(value, 0, before_origin)
        for key, value in (before or {}).items()
        if key in Settings.model_fields and key != "resume" and value is not None
    }
    read = read_settings_file(file) if file else {}
    budget = read.pop("budget") if isinstance(read.get("budget"), dict) else None
    for key, value in read.items():
        given[key] = _Given(value, 1, f"file {file}")
    variables = _variables()
    check_variables(environment, variables)
    for key, names in variables.items():
        for spelled in names:
            if spelled in environment:
                given[key] = _Given(environment[spelled], 2, f"${spelled}")
    for key, value in flags.items():
        if value is not None:
            given[key] = _Given(value, 3, "--" + key.replace("_", "-"))
    _check_known(given)
    _fold_switches(given)
    try:
        settings = Settings.model_validate({key: g.value for key, g in given.items()})
    except ValidationError as error:
        raise SettingsError(_explain(error, given)) from None
    origins = {key: given[key].origin if key in given else "default" for key in Settings.model_fields}
    return Resolved(settings, origins, budget)


def _variables() -> dict[str, list[str]]:
    names = {k: [f"SHMSTAGE_{k.upper()}"] for k in Settings.model_fields if k not in TABLES}
    for key, (bare, _) in SWITCHES.items():
        names[key] = [f"SHMSTAGE_{key.upper()}", bare]
    return names


def _check_known(given: Mapping[str, _Given]) -> None:
    known = [*Settings.model_fields, *SWITCHES]
    for key, item in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; `shmstage run --help` lists all settings"
            raise SettingsError(f"unknown setting {named(key)} = {shown(item.value)} ({item.origin}){hint}")
        if item.level == 1:
            _check_type(key, item)


def _check_type(key: str, item: _Given) -> None:
    """TOML has types, so a text (or true) is no number there; flags and variables are all texts."""
    kinds = [bool] if key in SWITCHES else list(leaves_of(Settings.model_fields[key].annotation))
    if type(item.value) not in (str, bool) or type(item.value) in kinds or item.value in kinds:
        return
    wanted = "true or false" if bool in kinds else "a number" if int in kinds or float in kinds else ""
    if wanted:
        quotes = ", without quotes" if isinstance(item.value, str) else ""
        raise SettingsError(f"{key} = {shown(item.value)} ({item.origin}): must be {wanted}{quotes}")


def leaves_of(annotation: Any) -> Iterator[Any]:
    """The types and literal values that an annotation is made of."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for each in inner:
        yield from leaves_of(each)


#: what each mode says of the three switches, in the order of ``SWITCHES``
_MEANING: dict[Boundary, tuple[bool, bool, bool]] = {
    "serial": (False, False, True),
    "pipelined": (True, False, True),
    "staged_after_update": (True, True, False),
    "staged_before_update": (True, True, True),
}


def _fold_switches(given: dict[str, _Given]) -> None:
    """Turn the three switches into ``boundary``.

    ``boundary`` sets all three; a switch from a higher level changes its own one. On the same level they must agree,
    where it matters: ``stage_before_update`` acts only with staging.
    """
    switches = {key: given.pop(key) for key in SWITCHES if key in given}
    named = given.get("boundary", _Given("serial", 0, "default"))
    if not switches or named.value not in BOUNDARIES:  # it may be no str: _MEANING could not be asked
        return
    value = dict(zip(SWITCHES, _MEANING[named.value], strict=True))
    for key, item in switches.items():
        wanted = _as_bool(key, item)
        matters = key != "stage_before_update" or value["stage_next_microbatch"]
        if item.level == named.level and matters and wanted != value[key]:
            raise SettingsError(
                f"boundary = {named.value} ({named.origin}) contradicts {key} ({item.origin}); give one of them"
            )
        if item.level > named.level:
            value[key] = wanted
    if value["stage_next_microbatch"] and not value["pipeline_step_boundary"]:
        origin = switches.get("stage_next_microbatch", named).origin
        raise SettingsError(
            f"stage_next_microbatch ({origin}) needs pipeline_step_boundary; add --pipeline-step-boundary or drop it"
        )
    mode: Boundary = "pipelined" if value["pipeline_step_boundary"] else "serial"
    if value["stage_next_microbatch"]:
        mode = "staged_before_update" if value["stage_before_update"] else "staged_after_update"
    if mode != named.value:
        top = max(switches.values(), key=lambda item: item.level)
        given["boundary"] = _Given(mode, top.level, top.origin)


def _as_bool(key: str, item: _Given) -> bool:
    if isinstance(item.value, bool):
        return item.value
    word = item.value.strip().lower() if isinstance(item.value, str) else item.value
    if word in ("1", 1, "true", "yes", "on"):
        return True
    if word in ("0", 0, "false", "no", "off", ""):
        return False
    raise SettingsError(f"{key} = {shown(item.value)} ({item.origin}) is no switch; use true or false")


def _explain(error: ValidationError, given: Mapping[str, _Given]) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    origin = f" ({given[key].origin})" if key in given else ""
    wanted = f"must be {WANTED[key][1]}" if key in WANTED else first["msg"].replace("Input should be", "must be")
    return f"{key} = {shown(first['input'], 120)}{origin}: {wanted[:1].lower()}{wanted[1:]}"
