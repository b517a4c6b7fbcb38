"""Our packed fields as tunix's payload: with classes like tunix's here, with the real package in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import adapters_venv
import flax.struct
import jax
import numpy as np
import pytest

from shmstage.adapters.tunix import TunixPayload
from shmstage.errors import InputError, LayoutError, MissingExtraError
from shmstage.packing.fields import microbatch_layout
from shmstage.trainer.decode import with_dense_routing

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROWS, TOKENS = 2, 16


@flax.struct.dataclass(frozen=True)
class TrainExample:
    """The fields of tunix.rl.common.TrainExample 0.1.7, in its order; a test below compares them."""

    prompt_ids: jax.Array
    prompt_mask: jax.Array
    completion_ids: jax.Array
    completion_mask: jax.Array
    advantages: jax.Array
    ref_per_token_logps: jax.Array | None
    old_per_token_logps: jax.Array | None
    segment_ids: jax.Array | None = None
    segment_positions: jax.Array | None = None
    sampler_is_weights: jax.Array | None = None


@flax.struct.dataclass(frozen=True)
class Unpacked:
    """As tunix had it before it packed."""

    prompt_ids: jax.Array
    prompt_mask: jax.Array
    completion_ids: jax.Array
    completion_mask: jax.Array
    advantages: jax.Array
    ref_per_token_logps: jax.Array | None
    old_per_token_logps: jax.Array | None


@flax.struct.dataclass(frozen=True)
class Routed(TrainExample):
    """With the fields of later payloads, one of them without a default."""

    returns: jax.Array | None = None
    routed_experts: jax.Array | None = None
    num_segments: int = flax.struct.field(pytree_node=False, kw_only=True)


def batch_of(optional: frozenset[str] = frozenset(), **routing: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Numbers that are different in every field; the segments are two of seven tokens a row."""
    if routing:
        routing |= {"layers": 2, "top_k": 2, "experts": 8}
        optional |= {"routing"}
    layout = microbatch_layout(ROWS, TOKENS, optional=optional, **routing)
    batch = layout.views(np.zeros(layout.nbytes, np.uint8), 0)
    for number, view in enumerate(batch.values()):
        view[...] = (np.arange(view.size) % 8 + number).reshape(view.shape)
    batch["segment_ids"][...] = np.repeat([1, 2, 0], [7, 7, 2])
    batch["segment_positions"][...] = [*range(7), *range(7), 0, 0]
    if "routed_experts_offsets" in batch:
        batch["routed_experts_offsets"][...] = [0, 14, 28]
    return batch


# --- what it makes ------------------------------------------------------------------------------------------------


def test_every_packed_field_is_handed_over_as_it_is_and_prompts_are_empty() -> None:
    batch = {name: jax.device_put(array) for name, array in batch_of(frozenset({"ref_logprobs"})).items()}
    example = TunixPayload(TrainExample)(batch)
    assert all(getattr(example, name) is array for name, array in batch.items())
    for prompt in (example.prompt_ids, example.prompt_mask):
        assert isinstance(prompt, jax.Array) and prompt.shape == (ROWS, 0) and prompt.dtype == np.int32
    assert example.sampler_is_weights is None


def test_reference_log_probs_that_were_not_packed_are_none() -> None:
    assert TunixPayload(TrainExample)(batch_of()).ref_per_token_logps is None


def test_host_arrays_stay_host_arrays() -> None:
    example = TunixPayload(TrainExample)(batch_of())
    assert {type(leaf) for leaf in jax.tree.leaves(example)} == {np.ndarray}


def test_inside_a_jitted_function_it_makes_the_same_payload() -> None:
    payload = TunixPayload(TrainExample)
    batch = {name: jax.device_put(array) for name, array in batch_of().items()}
    outside, inside = payload(batch), jax.jit(payload)(batch)
    assert jax.tree.structure(outside) == jax.tree.structure(inside)
    for one, other in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_every_payload_may_be_donated() -> None:
    payload = TunixPayload(TrainExample)
    step = jax.jit(lambda example: jax.tree.map(lambda leaf: leaf + 1, example), donate_argnums=0)
    for number in range(3):
        batch = {name: jax.device_put(array + number) for name, array in batch_of().items()}
        example = payload(batch)
        np.testing.assert_array_equal(step(example).completion_ids, batch_of()["completion_ids"] + number + 1)
        assert example.prompt_ids.is_deleted()


@pytest.mark.parametrize("encoding", ["dense", "ragged", "ragged_packed"])
def test_routing_is_handed_over_dense_whatever_it_was_encoded_as(encoding: str) -> None:
    batch = {name: jax.device_put(array) for name, array in batch_of(encoding=encoding).items()}
    example = TunixPayload(Routed, num_segments=4)(batch)
    assert example.routed_experts.shape == (ROWS, TOKENS, 2, 2) and example.num_segments == 4
    np.testing.assert_array_equal(example.routed_experts, with_dense_routing(batch)["routed_experts"])
    assert example.completion_ids is batch["completion_ids"]


# --- what it refuses ----------------------------------------------------------------------------------------------

VALUES = frozenset({"returns", "old_values"})


@pytest.mark.parametrize(
    ("payload_class", "batch", "told"),
    [
        (TrainExample, {"optional": VALUES}, r"TrainExample has no field 'returns', 'old_values'; it has prompt_ids,"),
        (Unpacked, {}, "Unpacked has no field 'segment_ids', 'segment_positions'|'segment_positions', 'segment_ids'"),
        (TrainExample, {"encoding": "dense"}, "has no field 'routed_experts'; "),
        (TrainExample, {"encoding": "ragged_packed"}, "has no field 'routed_experts'; "),
    ],
    ids=["values", "packed", "routing", "encoded routing"],
)
def test_a_field_that_the_class_lacks_is_refused_by_name(payload_class: type, batch: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError, match=told) as caught:
        TunixPayload(payload_class)(batch_of(**batch))
    assert "omit=(" in str(caught.value)


@pytest.mark.parametrize("encoding", ["dense", "ragged", "ragged_packed"])
def test_what_is_to_be_left_out_is_left_out(encoding: str) -> None:
    batch = batch_of(frozenset({"returns"}), encoding=encoding)
    example = TunixPayload(TrainExample, omit=("returns", "routed_experts"))(batch)
    assert example.completion_ids is batch["completion_ids"]


def test_a_field_that_only_the_caller_knows_is_asked_for() -> None:
    with pytest.raises(LayoutError, match=r"needs 'num_segments'.*TunixPayload\(num_segments=...\)"):
        TunixPayload(Routed)(batch_of())


def test_a_field_that_was_not_packed_is_no_none_where_none_is_no_value() -> None:
    batch = batch_of()
    del batch["advantages"]
    with pytest.raises(LayoutError, match="needs 'advantages', which the packed fields"):
        TunixPayload(TrainExample)(batch)


def test_a_value_may_not_come_from_both_sides() -> None:
    with pytest.raises(LayoutError, match=r"'advantages' was given .* packed field, too; .* omit=\('advantages',"):
        TunixPayload(TrainExample, advantages=0)(batch_of())


def test_a_constant_that_the_class_lacks_is_refused() -> None:
    with pytest.raises(LayoutError, match="has no field 'policy_version'.*, or do not give it to TunixPayload$"):
        TunixPayload(TrainExample, policy_version=3)


@pytest.mark.parametrize(
    ("payload_class", "told"),
    [
        (dict, "builtins.dict is no dataclass"),
        ("shmstage.errors:Absent", "shmstage.errors has no 'Absent'"),
        ("shmstage.nowhere:TrainExample", "no module named 'shmstage.nowhere'"),
        ("shmstage.errors:shown", "is a function, not a class"),
    ],
    ids=["no dataclass", "no class", "no module", "function"],
)
def test_a_payload_class_that_is_none_is_refused(payload_class: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        TunixPayload(payload_class)


def test_without_tunix_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(MissingExtraError, match="pip install google-tunix"):
        TunixPayload()


def test_a_field_is_refused_by_name_where_the_class_that_may_have_it_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "tunix.py").write_text("raise ImportError('libfoo.so.3: no such file')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import ecosystem.test_tunix as t\n"
        "try: t.TunixPayload(t.TrainExample)(t.batch_of(t.VALUES))\n"
        "except t.LayoutError as error: print(error)\n"
        "try: t.TunixPayload()\n"
        "except t.InputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parent, env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    first, second = done.stdout.splitlines() or [done.stderr] * 2
    assert "has no field 'returns', 'old_values'" in first
    assert "TrainExample cannot be imported: libfoo.so.3: no such file" in second


def test_the_adapter_imports_nothing_of_tunix() -> None:
    code = "import sys, shmstage.adapters.tunix; sys.exit('tunix' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


# --- the real package ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    found: dict[str, Any] = adapters_venv.run(HERE / "tunix_step.py", timeout_s=280.0, devices=4)
    return found


REAL = pytest.mark.timeout(300)


@REAL
def test_the_installed_payload_class_has_the_fields_that_the_tests_here_take_it_for(step: dict[str, Any]) -> None:
    assert step["class"] == "tunix.rl.common.TrainExample" and step["version"] == "0.1.7"
    assert step["fields"] == list(TrainExample.__dataclass_fields__)


@REAL
def test_adapter_and_own_engine_get_the_bits_of_the_slot(step: dict[str, Any]) -> None:
    assert (step["slot"], step["handed over"], step["traced"]) == ([], [], [])


@REAL
def test_the_payload_is_what_tunix_packs_itself_of_the_same_rollouts(step: dict[str, Any]) -> None:
    assert step["rows"] == 4
    assert step["packed by tunix"] == []


@REAL
def test_a_step_of_tunix_computes_the_same_bits_of_both(step: dict[str, Any]) -> None:
    assert step["step"] == []
    assert step["loss"] != 0 and step["gradient"] > 0


@REAL
def test_tunix_loss_trains_on_the_ready_made_engine(step: dict[str, Any]) -> None:
    assert step["engine"]["denominator"] == step["trained"]
    assert step["engine"]["loss"] == pytest.approx(step["loss"], rel=1e-5)
    assert step["engine"]["grad_norm"] == pytest.approx(step["gradient"], rel=1e-5)


@REAL
def test_the_installed_class_refuses_what_it_lacks_and_the_one_that_has_it_is_named(step: dict[str, Any]) -> None:
    assert "TrainExample of google-tunix 0.1.7 has no field 'returns', 'old_values'" in step["refused"]
    assert "take payload_class='tunix.rl.ppo.ppo_learner:TrainExample'" in step["refused"]
    assert step["taken by ppo"] == "tunix.rl.ppo.ppo_learner"


@REAL
def test_sharded_arrays_are_handed_over_where_they_lie_under_a_transfer_guard(step: dict[str, Any]) -> None:
    assert step["mesh"] == {"same": True, "prompts": [[4, 0], "int32", True], "made once": True}
