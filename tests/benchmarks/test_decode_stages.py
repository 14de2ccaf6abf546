"""The times of the compiled pass's steps, and what is computed from them."""

import numpy as np
import pytest
import torch

from benchmarks.decode_stages import COLUMNS, MODULES, Decoder, PassTimes, rows_of, work_of
from tests.embedded.tiny import write_tiny_model
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.bindings import step_names
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.team import Team

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

OF_TRAINING = {"keep heads", "keep attention"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return BaseModel.load("tiny", folder, None, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_step_of_a_decoding_pass_is_timed_and_their_sum_is_the_pass(
    base: BaseModel, num_threads: int
):
    team = Team(num_threads)
    times = Decoder(base, team, num_rows=3, context=40).fastest_pass(seconds=0.0)
    names, step_ns = step_names(team), times.steps_ns[:, 0]
    team.end()
    took = dict(zip(names, times.steps_ns.tolist(), strict=True))
    assert all(took[name][0] > 0 for name in (*MODULES, "attention"))
    assert all(took[name][1] == 0 for name in OF_TRAINING)  # no stage, nobody to wait for
    assert 0 < step_ns.sum() < times.whole_ns
    assert (times.steps_ns[:, 1] <= step_ns).all()


def test_the_work_of_products_is_two_operations_for_each_weight_and_row(base: BaseModel):
    work = work_of(base.config, num_bytes=4, num_rows=5, context=10)
    weights = sum(a * b for a, b in base.config.linear_shapes().values())
    assert sum(work[step].flop for step in MODULES) == 2 * 5 * weights
    assert sum(work[step].read_bytes for step in MODULES) == 4 * weights
    heads, pairs = base.config.num_heads, 5 * 10 * base.config.head_dim * base.config.num_layers
    assert work["attention"].flop == 4 * pairs * heads


def test_a_step_that_takes_no_time_is_left_out_and_the_rest_adds_up(base: BaseModel):
    names = ["q, k, v", "keep heads"]
    work = work_of(base.config, 4, 1, 1)
    times = PassTimes(np.array([[600_000, 60_000], [100, 0]]), 1_000_000)
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows_of(names, times, work)}
    assert list(rows) == ["q, k, v", "outside of these", "whole"]
    assert (rows["q, k, v"]["us"], rows["q, k, v"]["waiting"]) == (600, "10%")
    assert rows["outside of these"]["share"] == "40.0%"
    assert rows["whole"]["us"] == 1000
