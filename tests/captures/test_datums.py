"""Trajectories as training examples."""

import pytest

from tests.captures.turns import turn
from tinkercloud.captures.datums import LOSSES, datum
from tinkercloud.captures.rewards import Scored, scored
from tinkercloud.captures.trajectories import trajectories
from tinkercloud.losses import LOSSES as SERVED


def two_turns() -> Scored:
    turns = [turn("a", prompt=(1, 2, 3)), turn("b", "a", prompt=(4,))]
    rewards = {"capture": 2.0}
    return scored(trajectories(turns), rewards, "raw", None)[0]


def test_position_i_predicts_token_i_plus_1_and_only_samples_are_trained():
    made = datum(two_turns(), "importance_sampling")
    inputs = {name: tensor["data"] for name, tensor in made["loss_fn_inputs"].items()}
    assert made["model_input"]["chunks"][0]["tokens"] == [1, 2, 3, 7, 8, 4, 7]
    assert inputs["target_tokens"] == [2, 3, 7, 8, 4, 7, 8]
    assert inputs["logprobs"] == [0, 0, -1, -2, 0, -1, -2]
    assert inputs["advantages"] == [0, 0, 2, 2, 0, 2, 2]


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_datum_has_what_its_loss_asks_for(loss: str):
    inputs = datum(two_turns(), loss)["loss_fn_inputs"]
    assert set(inputs) == {"target_tokens", *SERVED[loss].inputs}
    assert {tuple(tensor["shape"]) for tensor in inputs.values()} == {(7,)}


def test_the_mask_of_gspo_has_every_sampled_token():
    inputs = datum(two_turns(), "gspo")["loss_fn_inputs"]
    assert inputs["sequence_ratio_mask"]["data"] == [0, 0, 1, 1, 0, 1, 1]
