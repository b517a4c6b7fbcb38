"""What a run needs: golden figures, the very bytes of a real pool, every amount at every moment."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from budget_making import GOLDEN, ROUTED, small

from shmstage.budget.fields import MicrobatchFields, words
from shmstage.budget.formula import MOMENTS, SCOPES, Inputs, forecast
from shmstage.errors import LayoutError, SettingsError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.packing.fields import RECOMPUTED, REF_LOGPS, microbatch_layout
from shmstage.packing.journal import SEGMENT_NBYTES
from shmstage.trainer.weights import BUFFERS


def amounts(inputs: Inputs, moment: str = "steady") -> dict[str, int]:
    return {amount.name: getattr(amount, moment) for amount in forecast(inputs).amounts}


def test_the_golden_slot() -> None:
    """L2, L3: 64 x 65,536 with top-10 of 60 layers and seven words is 5,150,605,312 bytes, to the byte."""
    found = forecast(Inputs(**GOLDEN, fields=ROUTED))
    assert found.layout.payload_nbytes == 5_150_605_312
    assert found.slot_nbytes == 5_150_605_312
    by_name = {field.name: field.nbytes for field in found.layout.fields}
    assert by_name.pop("routed_experts") == 5_033_164_800
    assert len(by_name) == 7
    assert set(by_name.values()) == {4 * 64 * 65536}


def test_the_golden_slot_with_packed_routing() -> None:
    """L2: words and 9-bit routing are 2,948,595,712 bytes, validity bitmap and row offsets come on top."""
    packed = forecast(Inputs(**GOLDEN, fields=replace(ROUTED, encoding="ragged_packed")))
    by_name = {field.name: field.nbytes for field in packed.layout.fields}
    offsets, validity = by_name.pop("routed_experts_offsets"), by_name.pop("routed_experts_validity")
    assert sum(by_name.values()) == 2_948_595_712
    assert (offsets, validity) == (260, 31_457_280)


@pytest.mark.parametrize("late", [(), (REF_LOGPS, *RECOMPUTED)])
def test_the_pool_takes_as_many_bytes_as_the_real_one(late: tuple[str, ...]) -> None:
    """L2: forecast and ``Pool.create`` agree to the byte, late fields and alignment included."""
    fields = MicrobatchFields(frozenset({"routing", "returns"}), layers=3, top_k=2, late=late)
    found = forecast(small(rows=3, tokens=100, fields=fields, slots=4, aux_slots=2))
    layout = microbatch_layout(3, 100, optional=fields.optional, layers=3, top_k=2, late=late)
    assert found.layout == layout
    identity = ProcessIdentity.create("budget-tests", "orchestrator")
    pool = Pool.create("budget-tests", epoch=1, layouts=[layout], slots=4, aux_slots=2, identity=identity)
    try:
        assert Path("/dev/shm" + pool.name).stat().st_size == pool.nbytes == found.pool_nbytes
        assert found.total("steady", "shm") == pool.nbytes
    finally:
        pool.close()
        identity.close()


@pytest.mark.parametrize("encoding", ["dense", "ragged", "ragged_packed"])
def test_late_fields_lie_last_whatever_else_there_is(encoding: str) -> None:
    """L2: in their own page-aligned region, behind ragged routing and fields without a name, too."""
    late = (REF_LOGPS, *RECOMPUTED)
    fields = MicrobatchFields(layers=2, top_k=2, experts=8, late=late, extra=("word_field_7",), encoding=encoding)
    layout = forecast(small(rows=3, tokens=100, fields=fields)).layout
    assert layout.late_names == late
    assert layout.late_offset % 4096 == 0
    assert {"word_field_7"} < {field.name for field in layout.fields if not field.late}


def test_a_slot_holds_the_larger_of_training_and_evaluation() -> None:
    wide = MicrobatchFields(frozenset({"returns", "old_values"}))
    assert forecast(small(evaluation=wide)).slot_nbytes == forecast(small(fields=wide)).slot_nbytes
    assert forecast(small(fields=wide, evaluation=MicrobatchFields())).slot_nbytes == 8 * 4 * 4 * 256


def test_every_figure_is_a_whole_number_of_bytes() -> None:
    """L3: bytes are integers; a float would lose them beyond 2**53."""
    inputs = Inputs(
        rows=1001, tokens=65537, fields=ROUTED, fill=Fraction(1, 3), param_nbytes=2**53 + 1, optimizer_nbytes=2**54 + 1,
        weight_sync=True, journaled=True, checkpoint_every=3, steps=10, replay=True, reference=True, hosts=3,
    )  # fmt: skip
    found = forecast(inputs)
    for amount in found.amounts:
        assert all(type(getattr(amount, moment)) is int for moment in MOMENTS), amount
        assert amount.most >= 0
    assert type(found.total("steady", *SCOPES)) is int
    assert amounts(inputs)["parameters"] == 2**53 + 1


@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**32 + 1])
def test_sizes_around_two_and_four_gib_come_out_as_they_went_in(nbytes: int) -> None:
    """S78: 2 GiB - 1, 2 GiB and 4 GiB + 1 of parameters, and a field of as many bytes."""
    found = amounts(small(param_nbytes=nbytes, platform="accelerator"))
    assert found["parameters"] == found["accumulators"] == nbytes
    # rows x tokens x 4 bytes of one field: 2 GiB and beyond
    layout = forecast(Inputs(rows=1 << 15, tokens=1 << 14)).layout
    assert layout.fields[0].nbytes == 2**31
    assert forecast(Inputs(rows=1, tokens=(1 << 30) + 1)).layout.fields[0].nbytes == 2**32 + 4


def test_trajectories_of_two_steps_wait_encoded_and_are_told_raw() -> None:
    fields = MicrobatchFields(frozenset({"routing"}), layers=60, top_k=10, experts=512, encoding="ragged_packed")
    inputs = small(fields=fields, microbatches_per_step=3, fill=Fraction(1, 2))
    real = 3 * 4 * 256 // 2
    found = amounts(inputs)
    assert found["held_trajectories"] == 2 * real * (4 * 4 + 60 * 10 * 2)
    assert found["held_trajectories_encoded"] == 2 * (real * (4 * 4 * 8 + 60 * (10 * 9 + 1)) // 8)
    rest = found["device_buffers"] + found["dense_decode"]
    assert forecast(inputs).total("steady", "host") == found["held_trajectories_encoded"] + rest
    # a trajectory alone has no padding: ragged holds it as it came
    ragged = replace(inputs, fields=replace(fields, encoding="ragged"))
    assert forecast(ragged).total("steady", "host") == found["held_trajectories"] + sum(
        amounts(ragged)[name] for name in ("device_buffers", "dense_decode")
    )


def test_what_waits_encoded_counts_as_that_against_its_limit_and_raw_in_the_journal() -> None:
    fields = MicrobatchFields(frozenset({"routing"}), layers=60, top_k=10, experts=512, encoding="ragged_packed")
    raw_nbits, encoded_nbits = 4 * 4 * 8 + 60 * 10 * 16, 4 * 4 * 8 + 60 * (10 * 9 + 1)
    assert (fields.trajectory_nbits, fields.encoded_nbits) == (raw_nbits, encoded_nbits)
    free = small(fields=fields)
    waiting = amounts(free)["held_trajectories_encoded"]
    capped = replace(free, max_held_nbytes=waiting // 2)
    assert amounts(capped)["held_trajectories_encoded"] == waiting // 2
    assert amounts(replace(free, max_held_nbytes=waiting))["held_trajectories_encoded"] == waiting
    assert free.row_nbytes == -(-256 * encoded_nbits // 8)
    bundle = replace(free, held_input_nbytes=raw_nbits * 100, evaluation=fields, evaluation_nbytes=raw_nbits)
    assert amounts(bundle)["held_trajectories_encoded"] == encoded_nbits * 100
    assert amounts(bundle)["evaluation_trajectories"] == encoded_nbits
    journaled = replace(capped, journaled=True)
    arrived = waiting // 2 * raw_nbits // encoded_nbits
    assert amounts(journaled)["journal"] >= arrived > 1.7 * (waiting // 2)


def test_a_limit_on_what_is_held_caps_it_and_a_bundle_is_held_whole() -> None:
    whole = amounts(small())["held_trajectories"]
    assert whole == 2 * 3 * 4 * 256 * 16
    assert amounts(small(max_held_nbytes=1000))["held_trajectories"] == 1000
    assert amounts(small(max_held_nbytes=whole + 1))["held_trajectories"] == whole
    assert amounts(small(held_input_nbytes=12345, max_held_nbytes=1000))["held_trajectories"] == 12345


@pytest.mark.parametrize(
    ("per_step", "buffers", "slots", "held"),
    [
        (3, 2, 3, 7),  # step k, k + 1, and the first of k + 2
        (1, 2, 3, 4),  # two steps in the buffers, and the two that may be packed beyond the last that was sent
        (8, 2, 3, 16),  # slots and buffers end before a second step does
        (3, 8, 9, 13),  # three steps were closed and wait for the device, the fourth is sent
        (3, 8, 2, 12),
    ],
)
def test_a_pipelined_run_holds_what_buffers_and_slots_let_it_begin(
    per_step: int, buffers: int, slots: int, held: int
) -> None:
    inputs = small(pipelined=True, microbatches_per_step=per_step, device_buffers=buffers, slots=slots)
    assert amounts(inputs)["held_trajectories"] == held * 4 * 256 * 16
    serial = replace(inputs, pipelined=False)
    assert amounts(serial)["held_trajectories"] == 2 * per_step * 4 * 256 * 16


def test_max_real_tokens_bounds_what_is_real() -> None:
    assert small(max_real_tokens=100).real_tokens == 100
    assert small(max_real_tokens=1 << 30).real_tokens == 4 * 256
    assert small(fill=Fraction(1, 1000)).real_tokens == 2  # of 1.024: rounded up
    assert small(fill=Fraction(0)).real_tokens == 0


def test_a_journal_holds_what_no_durable_checkpoint_covers() -> None:
    step = 3 * 4 * 256 * 16
    assert "journal" not in amounts(small())
    # three host copies in the making and one that waits to be copied, then what is trained and what is packed ahead
    assert amounts(small(journaled=True, checkpoint_every=5))["journal"] == 22 * step + SEGMENT_NBYTES
    assert amounts(small(journaled=True, steps=10))["journal"] == 12 * step + SEGMENT_NBYTES
    assert amounts(small(journaled=True, max_held_nbytes=999))["journal"] == 5 * 999 + SEGMENT_NBYTES
    held = 3 * step
    assert amounts(small(journaled=True, max_held_nbytes=held))["journal"] == held + 4 * step + SEGMENT_NBYTES


def test_held_bytes_of_a_journaled_source_may_force_a_checkpoint_at_any_step() -> None:
    state = {"param_nbytes": 1000, "optimizer_nbytes": 2000, "steps": 4, "max_held_nbytes": 1 << 20}
    forced, free = small(**state, journaled=True), small(**state)
    assert [amounts(forced, "checkpoint")[name] for name in ("optimizer_snapshot", "checkpoints")] == [9000, 18000]
    assert [amounts(free, "checkpoint")[name] for name in ("optimizer_snapshot", "checkpoints")] == [3000, 6000]
    assert small(journaled=True, checkpoint_every=3).saves_every == 3


def test_what_is_scored_or_evaluated_has_a_buffer_of_its_own() -> None:
    """The golden run with evaluation and reference: three device buffers on CPU, of a whole slot each."""
    inputs = Inputs(**GOLDEN, fields=ROUTED, evaluation=MicrobatchFields())
    found = amounts(replace(inputs, reference=True, evaluates=True))
    assert found["device_buffers"] + found["scoring_buffer"] == 3 * 5_150_605_312 == 15_451_815_936
    assert "scoring_buffer" not in amounts(inputs)
    assert amounts(replace(inputs, recompute=True))["scoring_buffer"] == 5_150_605_312
    # an evaluation alone takes what an evaluated micro-batch takes
    assert amounts(replace(inputs, evaluates=True))["scoring_buffer"] == 6 * 4 * 64 * 65536
    # and what is trained never lies in a buffer larger than itself
    wide = small(evaluation=MicrobatchFields(frozenset({"returns", "old_values"})), evaluates=True)
    assert amounts(wide)["device_buffers"] == 2 * 6 * 4 * 4 * 256
    assert amounts(wide)["scoring_buffer"] == 8 * 4 * 4 * 256
    on_device = forecast(replace(wide, platform="accelerator"))
    assert on_device.total("steady", "device") == (2 * 6 + 8) * 4 * 4 * 256


def test_recomputed_fields_of_a_staged_microbatch_are_uploaded_once_more() -> None:
    fields = MicrobatchFields(late=(REF_LOGPS, *RECOMPUTED))
    staged = small(fields=fields, recompute=True, stages=True)
    assert amounts(staged)["patched_fields"] == len(RECOMPUTED) * 4 * 4 * 256
    assert "patched_fields" not in amounts(replace(staged, stages=False))
    scored_before = small(fields=MicrobatchFields(late=(REF_LOGPS,)), reference=True, stages=True)
    assert "patched_fields" not in amounts(scored_before)


@pytest.mark.parametrize("scoring", [{"reference": True}, {"recompute": True}])
def test_an_engine_that_scores_keeps_the_parameters_it_began_with(scoring: dict[str, bool]) -> None:
    assert amounts(small(param_nbytes=1000, **scoring))["reference_parameters"] == 1000
    assert "reference_parameters" not in amounts(small(param_nbytes=1000))


def test_sums_of_smaller_parameters_are_float32_all_the_same() -> None:
    found = amounts(small(param_nbytes=1000, sums_nbytes=2000))
    assert (found["accumulators"], found["gradients"]) == (2000, 1000)


def test_evaluation_trajectories_are_an_amount_of_their_own() -> None:
    inputs = small(evaluation_nbytes=777, process_nbytes=5)
    assert amounts(inputs)["evaluation_trajectories"] == 777
    assert amounts(inputs)["processes"] == 5
    assert forecast(inputs).total("steady", "host") - forecast(small()).total("steady", "host") == 782


def test_on_cpu_the_device_side_is_the_trainers_private_memory() -> None:
    on_cpu, elsewhere = small(device_buffers=3), small(device_buffers=3, platform="accelerator")
    assert forecast(on_cpu).total("steady", "device") == 0
    assert amounts(on_cpu)["device_buffers"] == 3 * forecast(on_cpu).slot_nbytes
    assert forecast(elsewhere).total("steady", "device") == 3 * forecast(elsewhere).layout.payload_nbytes


def test_an_encoding_costs_a_dense_array_inside_the_program_and_a_replay_another() -> None:
    packed = replace(ROUTED, encoding="ragged_packed")
    dense = 64 * 65536 * 60 * 10 * 2
    assert "dense_decode" not in amounts(Inputs(**GOLDEN, fields=ROUTED))
    found = amounts(Inputs(**GOLDEN, fields=packed, replay=True))
    assert (found["dense_decode"], found["replay_workspace"]) == (dense, dense)
    assert "replay_workspace" not in amounts(Inputs(**GOLDEN, fields=packed))


def test_state_on_the_device_at_each_moment() -> None:
    inputs = small(param_nbytes=1000, optimizer_nbytes=2000, platform="accelerator", reference=True)
    buffers = amounts(inputs)["device_buffers"] + amounts(inputs)["scoring_buffer"]
    found = forecast(inputs)
    assert found.total("steady", "device") == buffers + 1000 + 2000 + 1000 + 1000 + 1000
    assert found.total("checkpoint", "device") == found.total("steady", "device")
    assert found.total("restart", "device") == buffers + 2 * 1000 + 2 * 2000 + 1000  # restored beside the first


def test_a_checkpoint_holds_host_copies_of_parameters_and_optimizer_state() -> None:
    inputs = small(param_nbytes=1000, optimizer_nbytes=2000, platform="accelerator")
    often = replace(inputs, checkpoint_every=1, steps=4)
    assert amounts(inputs)["optimizer_snapshot"] == 0
    assert amounts(inputs, "checkpoint")["optimizer_snapshot"] == 3000
    assert amounts(often, "checkpoint")["optimizer_snapshot"] == 3 * 3000
    assert amounts(often, "restart")["optimizer_snapshot"] == 3000
    assert [amounts(often, moment)["checkpoint_writer"] for moment in MOMENTS] == [0, 2 * 3000, 3000]
    assert [amounts(inputs, moment)["checkpoint_writer"] for moment in MOMENTS] == [0, 2 * 3000, 3000]
    on_host = {moment: forecast(often).total(moment, "host") for moment in MOMENTS}
    assert on_host["checkpoint"] - on_host["steady"] == (3 + 2) * 3000
    assert [amounts(often, moment)["checkpoints"] for moment in MOMENTS] == [15000, 18000, 15000]


def test_the_weights_pool_has_three_places_and_at_a_restart_there_are_two_of_it() -> None:
    inputs = small(param_nbytes=10_000, weight_sync=True)
    one = amounts(inputs)["weights_pool"]
    assert one == 3 * 12288 + 8192
    assert amounts(inputs, "restart")["weights_pool"] == 2 * one
    assert "weights_pool" not in amounts(small(param_nbytes=10_000))


@pytest.mark.parametrize("shapes", [[3] * 250, [1, 5, 17] * 80, [700]])
def test_the_weights_pool_of_many_small_arrays_takes_no_more_than_is_forecast(shapes: list[int]) -> None:
    """Every array is padded: 250 of twelve bytes take 57,344 bytes, not three pages and the headers."""
    layout = Layout.of({f"w{number}": ("float32", (size,)) for number, size in enumerate(shapes)})
    params = sum(4 * size for size in shapes)
    identity = ProcessIdentity.create("budget-tests", "trainer")
    pool = Pool.create("budget-tests", epoch=1, layouts=[layout], slots=BUFFERS, identity=identity)
    try:
        real = pool.nbytes
    finally:
        pool.close()
        identity.close()
    known = forecast(small(param_nbytes=params, weight_sync=True, param_leaves=len(shapes)))
    unknown = forecast(small(param_nbytes=params, weight_sync=True))
    sizes = [next(a for a in found.amounts if a.name == "weights_pool") for found in (known, unknown)]
    assert sizes[1].steady <= real <= sizes[0].steady <= real + 3 * (64 * len(shapes) + 4096)
    assert "at most" in sizes[0].formula
    assert "at least" in sizes[1].formula
    if len(shapes) == 250:
        assert (real, sizes[1].steady) == (57344, 20480)


def test_hosts_share_the_rows_and_hold_trajectories_in_the_object_store() -> None:
    alone, shared = Inputs(rows=65, tokens=256), Inputs(rows=65, tokens=256, hosts=4)
    assert forecast(shared).layout.fields[0].shape == (17, 256)
    assert "object_store" not in amounts(alone)
    assert "held_trajectories" not in amounts(shared)
    store = amounts(shared)["object_store"]
    assert store == 2 * 3 * 17 * 4 * 256 * 16  # all of them, on any node
    assert forecast(shared).total("steady", "shm") == forecast(shared).pool_nbytes + store


def test_words_beyond_the_mandatory_ones_are_the_optional_ones_and_then_nameless() -> None:
    optional, extra = words(12)
    layout = MicrobatchFields(optional, extra=extra).layout(2, 8)
    names = [field.name for field in layout.fields]
    assert names[6:10] == ["ref_per_token_logps", "returns", "old_values", "sampler_is_weights"]
    assert names[10:] == ["word_field_11", "word_field_12"]
    for count in (5, 65, -1):
        with pytest.raises(SettingsError, match=f"word_fields = {count}; .* give 6 to 64"):
            words(count)


def test_more_than_any_pool_may_hold_is_an_error_with_both_figures() -> None:
    with pytest.raises(LayoutError, match=r"need 211106232532992 bytes; the limit is 140737488355328"):
        forecast(Inputs(rows=1 << 20, tokens=1 << 24, fields=ROUTED))
    with pytest.raises(LayoutError, match=r"a pool of 141837\d+ bytes; the limit is 140737488355328; use"):
        forecast(Inputs(rows=1 << 17, tokens=1 << 20, slots=43, aux_slots=0))
