"""A custom loss on Megatron ranks: the one that is importance_sampling gives its numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.rank_scene import STEP, Scene
from tests.cluster.rank_scripts import Failed, Op, data_for, lora, play
from tinkercloud.core.custom_batch import with_custom_metrics
from tinkercloud.core.types import Datum, TrainBatch, TrainOutput

PLANS = ("tp2", "dp2", "pp2", "cp2")


def node(name: str, target: str, *args: Any, op: str = "call_function") -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args)}


def loss(index: Any = None) -> str:
    """-sum(exp(logprobs - old) advantages); index: of one target, in place of the sum."""
    last = node("total", "sum", {"ref": "terms"}, op="call_method")
    if index is not None:
        last = node("total", "operator.getitem", {"ref": "terms"}, index)
    nodes = [
        *(node(n, n, op="placeholder") for n in ("logprobs", "old", "advantages")),
        node("delta", "operator.sub", {"ref": "logprobs"}, {"ref": "old"}),
        node("ratio", "torch.exp", {"ref": "delta"}),
        node("gain", "operator.mul", {"ref": "ratio"}, {"ref": "advantages"}),
        node("terms", "operator.neg", {"ref": "gain"}),
        last,
        node("mean", "torch.mean", {"ref": "ratio"}),
        node(
            *("output", "output"),
            {"tuple": [{"ref": "total"}, {"dict": {"custom/ratio:mean": {"ref": "mean"}}}]},
            op="output",
        ),
    ]
    inputs = [{"name": n, "rank": 1} for n in ("logprobs", "old", "advantages")]
    return json.dumps({"name": "policy", "inputs": inputs, "graph": {"format": 1, "nodes": nodes}})


PLAIN = data_for("importance_sampling", [9, 2, 33, 20, 16], 7)


def custom(text: str) -> TrainBatch:
    data = [
        Datum(
            d.tokens,
            {
                "target_tokens": d.inputs["target_tokens"],
                "old": d.inputs["logprobs"],
                "advantages": d.inputs["advantages"],
            },
        )
        for d in PLAIN.data
    ]
    return replace(PLAIN, data=tuple(data), loss_fn="custom", loss_fn_config={}, custom_loss=text)


def script() -> list[Op]:
    return [
        ("create", "a", lora()),
        ("fb", "a", PLAIN),
        ("step", "a", STEP),
        ("create", "b", lora()),
        ("fb", "b", custom(loss(index=99))),
        ("fb", "b", custom(loss())),
        ("step", "b", STEP),
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scene = Scene(Path(tmp_path_factory.mktemp("scene")))
    return play({plan: scene.job(plan, script()) for plan in PLANS})


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_loss_has_the_same_numbers_and_gradient(
    results: dict[str, list[Any]], plan: str
) -> None:
    _, plain, plain_step, _, _, ours, our_step = results[plan]
    assert isinstance(ours, TrainOutput), ours
    assert ours.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert our_step == pytest.approx(plain_step, rel=1e-4)
    output = with_custom_metrics(ours)
    ratios = []
    for datum, fields, expected in zip(PLAIN.data, output.outputs, plain.outputs, strict=True):
        np.testing.assert_allclose(fields["logprobs"], expected["logprobs"], atol=1e-6)
        ratios.append(np.exp(fields["logprobs"] - datum.inputs["logprobs"]).mean())
    assert output.metrics["custom/ratio:mean"] == pytest.approx(np.mean(ratios), rel=1e-4)


@pytest.mark.parametrize("plan", PLANS)
def test_a_fault_is_told_alike_by_all_ranks_and_leaves_no_gradient(
    results: dict[str, list[Any]], plan: str
) -> None:
    failed = results[plan][4]
    assert isinstance(failed, Failed)
    assert "'total' (operator.getitem)" in str(failed)
