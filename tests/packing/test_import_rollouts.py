"""verl's and TRL's names, in JSON lines: what becomes of a record, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstage.errors import BundleError, TrajectoryError
from shmstage.packing.import_bundle import Imported, import_bundle
from shmstage.packing.trajectory import Trajectory

Import = Callable[..., Imported]


def verl(**changes: Any) -> dict[str, Any]:
    """2 of 4 prompt tokens are padding on the left, 1 of 4 response tokens on the right; one is a tool's."""
    plain = {
        "prompts": [0, 0, 5, 6],
        "responses": [7, 8, 9, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 0, 1, 0],
        "rollout_log_probs": [-0.5, -9.0, -0.25, 0.0],
        "token_level_rewards": [0.0, 0.0, 1.0, 0.0],
        "uid": "p",
    }
    return {key: value for key, value in {**plain, **changes}.items() if value is not ...}


def trl(**changes: Any) -> dict[str, Any]:
    plain = {
        "prompt_ids": [0, 5, 6],
        "prompt_mask": [0, 1, 1],
        "completion_ids": [7, 8, 0],
        "completion_mask": [1, 1, 0],
        "logprobs": [-0.5, -0.25, 0.0],
        "rewards": 1.0,
    }
    return {key: value for key, value in {**plain, **changes}.items() if value is not ...}


@pytest.fixture
def imported(tmp_path: Path) -> Import:
    def run(*records: dict[str, Any], **options: Any) -> Imported:
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
        return import_bundle(tmp_path / "in.jsonl", tmp_path / "out", **options)

    return run


def of(found: Imported) -> tuple[Trajectory, ...]:
    return found.bundle.trajectories


# --- verl ---------------------------------------------------------------------------------------------------


def test_padding_of_a_verl_record_goes_and_what_a_tool_said_stays_untrained(imported: Import) -> None:
    (trajectory,) = of(imported(verl(), advantages="rewards"))
    assert trajectory.tokens.tolist() == [5, 6, 7, 8, 9]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert trajectory.old_logprobs.tolist() == [0, 0, -0.5, -9, -0.25]
    assert trajectory.advantages.tolist() == [0, 0, 1, 1, 1]
    assert (trajectory.trajectory_id, trajectory.group_id) == ("row-1", "p")


def test_optional_fields_of_a_verl_record_are_carried(imported: Import) -> None:
    given = verl(ref_log_prob=[1, 2, 3, 4], returns=[5, 6, 7, 8], values=[9, 10, 11, 12], policy_version=3)
    (trajectory,) = of(imported(given, advantages="rewards"))
    assert trajectory.ref_logprobs is not None and trajectory.ref_logprobs.tolist() == [0, 0, 1, 2, 3]
    assert trajectory.returns is not None and trajectory.returns.tolist() == [0, 0, 5, 6, 7]
    assert trajectory.old_values is not None and trajectory.old_values.tolist() == [0, 0, 9, 10, 11]
    assert trajectory.policy_version == 3


def test_log_probs_of_the_sampler_come_before_those_that_verl_computed_again(imported: Import) -> None:
    (trajectory,) = of(imported(verl(old_log_probs=[-3, -3, -3, -3]), advantages="rewards"))
    assert trajectory.old_logprobs.tolist() == [0, 0, -0.5, -9, -0.25]


def test_log_probs_that_verl_computed_do_where_the_sampler_gave_none(imported: Import) -> None:
    given = verl(old_log_probs=[-3, -3, -3, -3], rollout_log_probs=...)
    assert of(imported(given, advantages="rewards"))[0].old_logprobs.tolist() == [0, 0, -3, -3, -3]


def test_the_prompt_is_the_front_of_input_ids_where_nothing_else_says_it(imported: Import) -> None:
    given = verl(prompts=..., input_ids=[0, 0, 5, 6, 7, 8, 9, 0])
    assert of(imported(given, advantages="rewards"))[0].tokens.tolist() == [5, 6, 7, 8, 9]


def test_without_an_attention_mask_a_padded_prompt_would_be_a_longer_one_and_is_refused(imported: Import) -> None:
    with pytest.raises(TrajectoryError, match="wants attention_mask.*or write 8 ones where nothing is padded"):
        imported(verl(attention_mask=...), advantages="rewards")


def test_a_prompt_that_comes_again_in_another_step_is_another_group(imported: Import) -> None:
    rewards = {3: (0, 1), 9: (1, 5)}
    steps = [trl(prompt_id="p", step=step, rewards=each) for step, of_step in rewards.items() for each in of_step]
    found = of(imported(*steps, advantages="centred"))
    assert [each.group_id for each in found] == ["step-3-p"] * 2 + ["step-9-p"] * 2
    assert [float(each.advantages[-1]) for each in found] == [-0.5, 0.5, -2.0, 2.0]


def test_without_a_response_mask_every_real_token_of_the_answer_trains(imported: Import) -> None:
    (trajectory,) = of(imported(verl(response_mask=...), advantages="rewards"))
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("response_mask", [[1, 1, 1, 0], ...])
@pytest.mark.parametrize("loss_mask", [[0, 0, 0, 0, 1, 0, 1, 0], [1, 0, 1, 0]])
def test_a_loss_mask_takes_out_what_a_tool_said_whatever_the_response_mask_has(
    imported: Import, loss_mask: list[int], response_mask: Any
) -> None:
    (trajectory,) = of(imported(verl(loss_mask=loss_mask, response_mask=response_mask), advantages="rewards"))
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 0, 1]


def test_rewards_of_a_uid_become_normalised_advantages(imported: Import) -> None:
    scores = [0.0, 1.0, 1.0]
    records = [verl(token_level_rewards=[0, score, 0, 0]) for score in scores]
    records.insert(1, verl(uid="other", token_level_rewards=[9, 0, 0, 0]))
    found = imported(*records)
    std = np.std(scores, ddof=1)
    want = [(score - np.mean(scores)) / (std + 1e-6) for score in scores]
    got = [float(trajectory.advantages[-1]) for trajectory in of(found) if trajectory.group_id == "p"]
    assert got == pytest.approx(want, rel=1e-6)
    assert [t.advantages[-1] for t in of(found) if t.group_id == "other"] == [9.0]
    assert found.notes == ("groups of one answer, which is compared to nothing: 1; its advantage is the reward",)
    assert found.bundle.manifest["provenance"]["advantages"] == "normalised"
    assert found.bundle.manifest["provenance"]["epsilon"] == 1e-6


def test_rewards_are_centred_when_asked(imported: Import) -> None:
    found = imported(verl(), verl(token_level_rewards=[0, 0, 0, 0]), advantages="centred")
    assert [float(trajectory.advantages[-1]) for trajectory in of(found)] == [0.5, -0.5]


def test_advantages_that_are_there_are_taken(imported: Import) -> None:
    found = imported(verl(advantages=[0.5, float(0), 0.25, 7], uid=...))
    assert of(found)[0].advantages.tolist() == [0, 0, 0.5, 0, 0.25]
    assert found.bundle.manifest["provenance"]["advantages"] == "given"


def test_advantages_that_are_there_are_made_anew_when_asked(imported: Import) -> None:
    found = imported(verl(advantages=[5.0] * 4), advantages="rewards")
    assert of(found)[0].advantages.tolist() == [0, 0, 1, 1, 1]


def test_what_is_not_used_is_named(imported: Import) -> None:
    found = imported(verl(data_source="gsm8k", position_ids=[0] * 8), advantages="rewards")
    assert found.notes == ("not used: data_source, position_ids",)
    assert found.bundle.manifest["provenance"]["ignored"] == ["data_source", "position_ids"]


def test_a_step_is_the_batch_and_a_group_lies_in_one(imported: Import) -> None:
    found = imported(verl(global_step=7))
    assert [trajectory.batch_index for trajectory in of(found)] == [7]
    with pytest.raises(BundleError, match="group 'p' lies in batch 1 and, with trajectory 'row-2', in batch 2"):
        imported_again(found, verl(step=1), verl(step=2))


# --- TRL ----------------------------------------------------------------------------------------------------


def test_padding_of_a_trl_record_goes_by_its_masks(imported: Import) -> None:
    (trajectory,) = of(imported(trl(), advantages="rewards"))
    assert trajectory.tokens.tolist() == [5, 6, 7, 8]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1]
    assert trajectory.old_logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert trajectory.advantages.tolist() == [0, 0, 1, 1]


def test_lists_without_masks_are_as_long_as_they_are(imported: Import) -> None:
    given = trl(prompt_mask=..., completion_mask=...)
    assert of(imported(given, advantages="rewards"))[0].tokens.tolist() == [0, 5, 6, 7, 8, 0]


def test_what_a_tool_said_is_not_trained(imported: Import) -> None:
    (trajectory,) = of(imported(trl(tool_mask=[0, 1, 1]), advantages="rewards"))
    assert trajectory.loss_mask.tolist() == [0, 0, 0, 1]


def test_one_advantage_of_a_completion_is_that_of_all_its_tokens(imported: Import) -> None:
    (trajectory,) = of(imported(trl(advantages=-0.5, ref_per_token_logps=[1, 2, 3])))
    assert trajectory.advantages.tolist() == [0, 0, -0.5, -0.5]
    assert trajectory.ref_logprobs is not None and trajectory.ref_logprobs.tolist() == [0, 0, 1, 2]


def test_rewards_of_several_functions_are_summed_and_those_that_do_not_apply_left_out(imported: Import) -> None:
    found = imported(trl(rewards=[1.0, None, 0.5]), advantages="rewards")
    assert of(found)[0].advantages.tolist() == [0, 0, 1.5, 1.5]


def test_the_reward_that_was_made_of_several_comes_before_their_sum(imported: Import) -> None:
    found = imported(trl(rewards=[1.0, 1.0], reward=0.25), advantages="rewards")
    assert of(found)[0].advantages.tolist() == [0, 0, 0.25, 0.25]


def test_without_a_group_id_the_answers_of_one_step_to_one_prompt_are_a_group(imported: Import) -> None:
    records = [trl(step=step, rewards=reward) for step, reward in ((1, 0), (1, 1), (2, 5), (2, 5))]
    found = imported(*records)
    assert len({trajectory.group_id for trajectory in of(found)}) == 2
    half = 0.5 / (np.std([0, 1], ddof=1) + 1e-4)
    got = [float(trajectory.advantages[-1]) for trajectory in of(found)]
    assert got == pytest.approx([-half, half, 0, 0], rel=1e-6)
    other_prompt = imported_again(found, trl(rewards=1), trl(rewards=2, prompt_ids=[0, 5, 7]))
    assert len({trajectory.group_id for trajectory in of(other_prompt)}) == 2


def imported_again(found: Imported, *records: dict[str, Any]) -> Imported:
    folder = found.bundle.path.parent
    (folder / "again.jsonl").write_text("\n".join(map(json.dumps, records)))
    return import_bundle(folder / "again.jsonl", folder / "again")


def test_a_log_prob_of_padding_may_be_anything(imported: Import) -> None:
    (trajectory,) = of(imported(trl(logprobs=[-0.5, -0.25, 1e300]), advantages="rewards"))
    assert trajectory.old_logprobs.tolist() == [0, 0, -0.5, -0.25]


def test_a_log_prob_that_is_not_finite_where_nothing_trains_becomes_zero(imported: Import) -> None:
    (trajectory,) = of(imported(trl(logprobs=[1e300, -0.25, 0], tool_mask=[0, 1, 1]), advantages="rewards"))
    assert trajectory.old_logprobs.tolist() == [0, 0, 0, -0.25]


# --- what is wrong is named ---------------------------------------------------------------------------------

WRONG = [
    (verl(responses=...), "wants responses .token ids of the answer., got only .*prompts"),
    (verl(prompts=...), "wants prompts or input_ids"),
    (verl(prompts=..., input_ids=[1, 2]), "input_ids wants prompt and responses, at least 4 tokens, got 2"),
    (verl(rollout_log_probs=...), "wants rollout_log_probs or old_log_probs .*calculate_log_probs=True"),
    (verl(rollout_log_probs=[0, 0]), "rollout_log_probs wants 4 values, one per token, got 2"),
    (verl(rollout_log_probs=[0, None, 0, 0]), r"rollout_log_probs wants a list of one value .* got None at \[1\]"),
    (verl(rollout_log_probs=[1e300, 0, 0, 0]), "old_logprobs wants finite numbers where tokens train, got inf"),
    (verl(attention_mask=[1, 1]), "attention_mask wants 8 values, one per token, got 2"),
    (verl(response_mask=[1, 2, 0, 0]), "response_mask wants 0 or 1 for each token"),
    (verl(responses=[7.5, 8, 9, 0]), "responses wants a list of token ids, got dtype float64"),
    (verl(responses=[-1, 8, 9, 0]), "responses wants token ids from 0 to 2147483647, got -1 to 9"),
    (verl(responses=[2**31, 8, 9, 0]), "responses wants token ids from 0 to 2147483647"),
    (verl(responses="abc"), "responses wants a list of one value per token, got 'abc'"),
    (verl(responses=[[7], [8], [9], [0]]), r"responses wants a list of one value per token, got \[7\] at \[0\]"),
    (verl(token_level_rewards=...), "wants token_level_rewards .or advantages., got neither"),
    (verl(token_level_rewards=[None]), "token_level_rewards wants a finite number, or a list of them"),
    (verl(token_level_rewards=[0.0, None, 1.0, 0.0]), "token_level_rewards wants a finite number, or a list of them"),
    (verl(token_level_rewards="1"), "token_level_rewards wants a finite number, or a list of them, got .'1'"),
    (verl(token_level_rewards=10**400), "token_level_rewards wants a finite number"),
    (verl(uid=...), "wants uid, the same for all answers to one prompt, got none; .*--advantages rewards"),
    (verl(uid=[1]), r"uid wants text or an integer, got \[1\]"),
    (verl(step=-1), "step wants an integer from 0, got -1"),
    (verl(attention_mask=[0, 0, 0, 0, 1, 1, 1, 0]), "the prompt wants at least one token"),
    (trl(completion_ids=..., completion="text"), "wants completion_ids .*got only .*'completion'.*has texts only"),
    (trl(prompt_ids=...), "wants prompt_ids"),
    (trl(logprobs=...), "wants logprobs or sampling_per_token_logps or old_per_token_logps"),
    (trl(completion_mask=[1]), "completion_mask wants 3 values, one per token, got 1"),
    (trl(rewards=...), "wants rewards .or advantages., got neither"),
]


@pytest.mark.parametrize(("wrong", "match"), WRONG, ids=[match[:50] for _, match in WRONG])
def test_a_wrong_record_is_named_with_row_field_want_and_got(
    tmp_path: Path, imported: Import, wrong: dict[str, Any], match: str
) -> None:
    is_verl = "responses" in wrong or "prompts" in wrong
    with pytest.raises(TrajectoryError, match=rf"in\.jsonl, line 2: {match}"):
        imported(verl() if is_verl else trl(), wrong, format="verl" if is_verl else "trl")
    assert not (tmp_path / "out").exists()


def test_advantages_in_some_rows_only_are_refused(imported: Import) -> None:
    with pytest.raises(TrajectoryError, match="line 2: wants advantages, got none, and other rows have them"):
        imported(trl(advantages=1.0), trl())


def test_given_advantages_have_to_be_there_when_asked_for(imported: Import) -> None:
    with pytest.raises(TrajectoryError, match="line 1: wants advantages, got none; write them in every row"):
        imported(trl(), advantages="given")


def test_names_of_nobody_are_refused_with_what_was_looked_for(imported: Import) -> None:
    with pytest.raises(TrajectoryError, match=r"wants tokens .our names., responses .verl's. or completion_ids"):
        imported({"text": "a"})


def test_a_rule_for_advantages_is_refused_for_records_that_have_them_by_our_name(imported: Import) -> None:
    line = {"tokens": [1, 2], "loss_mask": 1, "advantages": 1, "old_logprobs": [0, 0]}
    with pytest.raises(TrajectoryError, match="advantages = centred is for verl and trl records"):
        imported(line, advantages="centred")
