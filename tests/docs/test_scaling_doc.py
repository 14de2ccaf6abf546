"""docs/scaling.md is what its script writes, and its arithmetic is sound."""

import importlib.util
import sys
from dataclasses import replace

import pytest

from tests.planning.public_configs import public_config
from tinkercloud.planning.model_table import read_shape
from tinkercloud.planning.plan import ClusterShape, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder


@pytest.fixture(scope="module")
def scaling(request):
    path = request.config.rootpath / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_document_is_up_to_date(scaling):
    written = scaling.TARGET.read_text(encoding="utf-8")
    assert written == scaling.render(list(scaling.cases())), "run benchmarks/scaling.py"


def test_the_document_shows_its_picture_and_says_what_it_is(scaling):
    written = scaling.TARGET.read_text(encoding="utf-8")
    assert scaling.PICTURE.stat().st_size > 10_000
    assert "(scaling.png)" in written
    assert "a model, not a measurement" in written


def test_flops_of_a_dense_network_are_six_for_each_weight_and_attention(scaling):
    shape = read_shape(public_config("Llama-3.1-8B"))
    weights = 8_030_261_248 - 128256 * 4096
    attention = 6 * 32 * 4096 * scaling.SEQ_LEN**2
    expected = 6 * weights * scaling.SEQ_LEN + attention
    assert scaling.model_flops(shape, lora=False, recompute=False) == expected


def test_frozen_weights_save_a_third_and_recomputation_costs_a_third(scaling):
    shape = replace(read_shape(public_config("Llama-3.1-8B")), heads=1, head_dim=1)
    full = scaling.model_flops(shape, lora=False, recompute=False)
    assert scaling.model_flops(shape, lora=True, recompute=False) / full == pytest.approx(
        2 / 3, 0.01
    )
    assert scaling.model_flops(shape, lora=False, recompute=True) / full == pytest.approx(
        4 / 3, 0.01
    )


def test_one_rank_alone_neither_communicates_nor_waits(scaling):
    config = public_config("Qwen3-0.6B")
    plan = SlimeArgumentBuilder(ClusterShape(1)).build(
        config, PlanConstraints(max_seq_len=scaling.SEQ_LEN)
    )
    step = scaling.step(read_shape(config), plan)
    assert (step.communication, step.bubble) == (0, 0)
    assert (
        step.total
        == step.compute
        == pytest.approx(step.flops / (scaling.PEAK_FLOPS * scaling.DENSE_EFFICIENCY))
    )
