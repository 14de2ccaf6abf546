"""Checkpoints across plans and backends, exports, and device memory, on real Megatron ranks.

All jobs run in one start of two processes; the tests read their results.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cluster.rank_scene import GOOD, MORE, PLANS, STEP, Scene, assert_equal
from tests.cluster.rank_scripts import (
    SHOW_GRADIENT,
    Embedded,
    Job,
    Op,
    assert_close,
    assert_same_output,
    lora,
    play,
    tensors,
)

BEFORE: list[Op] = [("fb", "m", GOOD), ("step", "m", STEP), ("fb", "m", MORE), ("step", "m", STEP)]
AFTER: list[Op] = [("fb", "m", MORE), ("step", "m", STEP), ("fb", "m", GOOD), ("step", "m", STEP)]

Jobs = dict[str, Job]
JOBS: list[Callable[[Scene], Jobs]] = []


def job(function: Callable[[Scene], Jobs]) -> Callable[[Scene], Jobs]:
    JOBS.append(function)
    return function


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def results(scene: Scene) -> dict[str, list[Any]]:
    for kind in ("llama", "qwen3"):
        for full in (False, True):
            embedded_part(scene, kind, full)
    jobs: Jobs = {}
    for add in JOBS:
        jobs |= add(scene)
    return play(jobs)


def spec_of(full: bool) -> Any:
    return lora(rank=0) if full else lora()


# ---- resuming elsewhere

MOVES = [("tp2", "dp2"), ("dp2", "tp2"), ("ep2", "ep2"), ("pp2", "cp2")]
KIND_PLAN = {"llama": "tp2", "qwen3": "pp2"}


def embedded_part(scene: Scene, kind: str, full: bool) -> None:
    """Uninterrupted, and a checkpoint in the middle."""
    out = scene.scratch("embedded", kind, full)
    script: list[Op] = [
        ("create", "m", spec_of(full)), *BEFORE, ("save", "m", out / "middle", True), *AFTER,
        ("save", "m", out / "end", True),
    ]  # fmt: skip
    Embedded(scene.folders[kind], out / "versions").play(script)


@job
def moves(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for first, second in MOVES:
        for full in (False, True):
            out = scene.scratch("move", first, full)
            there: list[Op] = [
                ("create", "m", spec_of(full)), *BEFORE, ("save", "m", out / "middle", True),
                *AFTER, ("save", "m", out / "uninterrupted", True),
            ]  # fmt: skip
            here: list[Op] = [("load", "m", out / "middle", True), *AFTER,
                              ("save", "m", out / "moved", True)]  # fmt: skip
            jobs[f"from {first} {full}"] = scene.job(first, there, full=full)
            jobs[f"move {first} {full}"] = scene.job(second, here, full=full)
    return jobs


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("first", "second"), MOVES)
def test_a_checkpoint_of_one_plan_resumes_under_another(
    scene: Scene, results: dict[str, list[Any]], first: str, second: str, full: bool
) -> None:
    assert results[f"move {first} {full}"][0] == spec_of(full)
    out = scene.scratch("move", first, full)
    assert_close(tensors(out / "moved"), tensors(out / "uninterrupted"))
    if first == second:
        assert_equal(out / "moved", out / "uninterrupted")


@job
def from_embedded(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for kind, plan in KIND_PLAN.items():
        for full in (False, True):
            out = scene.scratch("embedded", kind, full)
            script: list[Op] = [("load", "m", out / "middle", True), *AFTER,
                                ("save", "m", out / "here", True)]  # fmt: skip
            jobs[f"embedded {kind} {full}"] = scene.job(plan, script, full=full)
    return jobs


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", KIND_PLAN)
def test_a_checkpoint_of_the_embedded_backend_resumes_on_ranks(
    scene: Scene, results: dict[str, list[Any]], kind: str, full: bool
) -> None:
    out = scene.scratch("embedded", kind, full)
    assert_close(tensors(out / "here"), tensors(out / "end"))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("plan", ["tp2", "pp2"])
def test_a_checkpoint_of_ranks_resumes_in_the_embedded_backend(
    scene: Scene, results: dict[str, list[Any]], plan: str, full: bool, tmp_path: Path
) -> None:
    out = scene.scratch("move", plan, full)
    there = Embedded(scene.folders[PLANS[plan][0]], tmp_path / "versions")
    there.play([("load", "m", out / "middle", True), *AFTER, ("save", "m", tmp_path / "end", True)])
    assert_close(tensors(tmp_path / "end"), tensors(out / "uninterrupted"))


# ---- device memory


@job
def memory(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for plan, full, dtype in (
        ("tp2", False, "float32"), ("dp2", True, "float32"), ("pp2", True, "bfloat16"),
        ("dp2", False, "bfloat16"),
    ):  # fmt: skip
        out = scene.scratch("memory", plan, full)
        begin: list[Op] = [("create", "m", spec_of(full)), *BEFORE, ("fb", "m", GOOD)]
        away: list[Op] = [("stats",), ("offload",), ("sizes",), ("stats",), ("onload",), ("stats",)]
        end: list[Op] = [("fb", "m", MORE), ("step", "m", STEP)]
        script = [
            *begin, *end, ("save", "m", out / "stayed", True), ("delete", "m"),
            *begin, *away, *end, *away, ("save", "m", out / "went", True),
        ]  # fmt: skip
        jobs[f"memory {plan} {full}"] = scene.job(plan, script, full=full, dtype=dtype)
    return jobs


MEMORY = [("tp2", False), ("dp2", True), ("pp2", True), ("dp2", False)]


@pytest.mark.parametrize(("plan", "full"), MEMORY)
def test_training_continues_bit_by_bit_after_offload_and_onload(
    scene: Scene, results: dict[str, list[Any]], plan: str, full: bool
) -> None:
    out = scene.scratch("memory", plan, full)
    assert_equal(out / "went", out / "stayed")


@pytest.mark.parametrize(("plan", "full"), MEMORY)
def test_offload_frees_all_bytes_of_stats_and_onload_takes_them_again(
    scene: Scene, results: dict[str, list[Any]], plan: str, full: bool
) -> None:
    *_, before, freed, sizes, away, taken, after, _ = results[f"memory {plan} {full}"]
    for rank in range(2):
        assert freed[rank] == taken[rank] == sum(before[rank].values())
        assert sizes[rank] == 0
        assert sum(away[rank].values()) == 0
        assert after[rank] == before[rank]
        assert all(size > 0 for size in before[rank].values())


def test_adapters_gradients_and_optimizer_states_are_float32_on_a_bfloat16_base(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    for plan, full in (("pp2", True), ("dp2", False)):
        saved = tensors(scene.scratch("memory", plan, full) / "stayed")
        assert all(tensor.dtype == torch.float32 for tensor in saved.values())
        trained = [t for name, t in saved.items() if not name.startswith("exp_avg")]
        assert any(not torch.equal(t, t.bfloat16().float()) for t in trained)


def test_a_bfloat16_model_has_the_losses_of_the_float32_model_within_its_rounding(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    for plan, full in (("pp2", True), ("dp2", False)):
        rough = results[f"memory {plan} {full}"][1]
        fine = results[f"from {plan} {full}"][1]
        for a, b in zip(rough.outputs, fine.outputs, strict=True):
            assert np.abs(a["logprobs"] - b["logprobs"]).mean() < 0.05


@job
def without_gradient(scene: Scene) -> Jobs:
    out = scene.scratch("still")
    script: list[Op] = [
        ("create", "m", lora()), ("fb", "m", GOOD), ("step", "m", STEP), ("step", "m", STEP),
        ("fb", "m", GOOD), ("step", "m", SHOW_GRADIENT), ("save", "m", out / "here", True),
    ]  # fmt: skip
    embedded = [*script[:-1], ("save", "m", out / "there", True)]
    Embedded(scene.folders["llama"], out / "versions").play(embedded)
    return {"still": scene.job("tp2", script)}


def test_a_step_without_gradients_counts_as_gradient_zero(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    assert results["still"][3]["unclipped_grad_l2:mean"] == 0.0
    out = scene.scratch("still")
    assert_close(tensors(out / "here"), tensors(out / "there"))


def test_outputs_after_a_change_of_plan_are_those_before(results: dict[str, list[Any]]) -> None:
    for first, _ in MOVES:
        there, here = results[f"from {first} False"], results[f"move {first} False"]
        assert_same_output(here[1], there[6])


# ---- parts of a network


FLAGS = {
    "attention": {"train_mlp": False, "train_unembed": False},
    "mlp": {"train_attn": False, "train_unembed": False},
    "unembedding": {"train_attn": False, "train_mlp": False},
    "nothing": {"train_attn": False, "train_mlp": False, "train_unembed": False},
}


@job
def parts(scene: Scene) -> Jobs:
    """Under a pipeline, the first stage has nothing to train in some of them."""
    jobs: Jobs = {}
    for name, flags in FLAGS.items():
        out = scene.scratch("parts", name)
        begin: list[Op] = [("create", "m", lora(**flags)), *BEFORE]
        last: Op = ("save", "m", out / "here", True)
        jobs[f"parts {name}"] = scene.job("pp2", [*begin, last])
        theirs: list[Op] = [*begin, ("save", "m", out / "there", True)]
        if name != "nothing":
            Embedded(scene.folders["qwen3"], out / "versions").play(theirs)
    return jobs


@pytest.mark.parametrize("name", [name for name in FLAGS if name != "nothing"])
def test_flags_select_the_adapted_modules_and_stages_may_have_none(
    scene: Scene, results: dict[str, list[Any]], name: str
) -> None:
    out = scene.scratch("parts", name)
    assert_close(tensors(out / "here"), tensors(out / "there"))


def test_a_model_without_adapted_modules_stays_the_base(results: dict[str, list[Any]]) -> None:
    found = results["parts nothing"]
    assert found[2] == {"unclipped_grad_l2:mean": 0.0, "clipped_grad_l2:mean": 0.0}
    assert np.isfinite(found[3].metrics["loss:sum"])
