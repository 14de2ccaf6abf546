"""Training on real Megatron ranks equals the embedded backend's, whatever the plan.

All jobs of two ranks run in one start of two processes, all of four in one of four; the tests read
their results.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cluster.moe_reference import MoeReference
from tests.cluster.rank_scene import (
    CLIP,
    DECAY,
    FOUR,
    GOOD,
    MORE,
    PLANS,
    STEP,
    TWO,
    Scene,
    assert_equal,
)
from tests.cluster.rank_scripts import (
    SHOW_GRADIENT,
    Embedded,
    Failed,
    Job,
    Op,
    assert_close,
    assert_same_output,
    data_for,
    lora,
    play,
    tensors,
)
from tinkercloud.core.types import Datum, TrainBatch

# Two ranks show splits by tensors, layers, sequences and experts; four show them together.
CASES = [
    pytest.param(plan, full, marks=[pytest.mark.slow] * (plan in FOUR))
    for plan in PLANS
    for full in (False, True)
]


# ---- the script that every plan plays


def batches() -> list[TrainBatch]:
    """Every loss, 1 to 7 datums, lengths 1, odd and as long as a micro-batch."""
    return [
        data_for("cross_entropy", [5, 17, 1, 40, 3], 1),
        data_for("importance_sampling", [9], 2),
        data_for("ppo", [11, 2, 30, 1, 1, 25, 7], 3),
        data_for("cispo", [48, 13], 4),
        data_for("cross_entropy", [7, 4, 6], 5, targets=3),
        data_for("dro", [3, 21, 8], 6),
        data_for("gspo", [9, 2, 33, 20, 16], 7),
        with_kl(data_for("stable_reinforce", [6, 1, 31, 12], 8)),
    ]


def with_kl(batch: TrainBatch) -> TrainBatch:
    return replace(batch, loss_fn_config={**batch.loss_fn_config, "kl_coeff": 0.1})


def steps_of(name: str) -> list[Op]:
    """Three steps, with one call and with several, and then a gradient to be looked at."""
    one, two, three, four, five, six, seven, eight = (("fb", name, batch) for batch in batches())
    tail: list[Op] = [five, six, seven, eight, ("step", name, SHOW_GRADIENT)]
    return [one, ("step", name, STEP), two, three, ("step", name, DECAY), four, five,
            ("step", name, CLIP), *tail]  # fmt: skip


def equality(scratch: Path, full: bool) -> list[Op]:
    spec = lora(rank=0) if full else lora()
    return [
        ("create", "m", spec),
        ("save", "m", scratch / "fresh", False),
        *steps_of("m"),
        ("save", "m", scratch / "trained", True),
    ]


class References:
    """The script of `equality` by the embedded backend (experts: by transformers, which begins with
    the adapter that the ranks made: the plan asked for must have been played)."""

    def __init__(self, scene: Scene):
        self._scene = scene
        self._known: dict[tuple[str, bool], tuple[Path, list[Any]]] = {}

    def of(self, plan: str, full: bool) -> tuple[Path, list[Any]]:
        """The folder it wrote, and its results."""
        kind, _ = PLANS[plan]
        if (kind, full) not in self._known:
            self._known[kind, full] = self._play(plan, kind, full)
        return self._known[kind, full]

    def _play(self, plan: str, kind: str, full: bool) -> tuple[Path, list[Any]]:
        scene = self._scene
        folder = scene.scratch("reference", kind, full)
        script = equality(folder, full)
        if kind != "qwen3_moe":
            return folder, Embedded(scene.folders[kind], folder / "versions").play(script)
        if not full:
            script[0] = ("load", "m", scene.scratch(plan, full) / "fresh", False)
        return folder, MoeReference(scene.folders[kind]).play(script)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def references(scene: Scene) -> References:
    return References(scene)


Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def on_two(scene: Scene) -> Results:
    jobs = {
        f"{plan} {full}": scene.job(plan, equality(scene.scratch(plan, full), full), full=full)
        for plan in TWO
        for full in (False, True)
    }
    for add in JOBS:
        jobs |= add(scene)
    return play(jobs)


@pytest.fixture(scope="module")
def on_four(scene: Scene) -> Results:
    return play(
        {
            f"{plan} {full}": scene.job(plan, equality(scene.scratch(plan, full), full), full=full)
            for plan in FOUR
            for full in (False, True)
        }
    )


def results_of(plan: str, request: pytest.FixtureRequest) -> Results:
    return request.getfixturevalue("on_two" if plan in TWO else "on_four")


@pytest.mark.parametrize(("plan", "full"), CASES)
def test_outputs_losses_and_gradient_norms_equal_the_embedded_backends(
    scene: Scene, references: References, request: pytest.FixtureRequest, plan: str, full: bool
) -> None:
    ours = results_of(plan, request)[f"{plan} {full}"]
    _, theirs = references.of(plan, full)
    for op, own, expected in zip(equality(scene.root, full), ours, theirs, strict=True):
        if op[0] == "fb":
            assert_same_output(own, expected)
        elif op[0] == "step":
            assert own == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("plan", "full"), CASES)
def test_weights_moments_and_gradients_equal_the_embedded_backends(
    scene: Scene, references: References, request: pytest.FixtureRequest, plan: str, full: bool
) -> None:
    results_of(plan, request)
    folder, _ = references.of(plan, full)
    ours = tensors(scene.scratch(plan, full) / "trained")
    assert_close(ours, tensors(folder / "trained"))
    start = tensors(scene.scratch(plan, full) / "fresh")
    gradients = [t for name, t in ours.items() if name.startswith("exp_avg.")]
    assert all(float(g.abs().max()) > 0 for g in gradients)
    assert all(not torch.equal(t, ours[name]) for name, t in start.items())


@pytest.mark.parametrize("plan", [p for p, (kind, _) in PLANS.items() if kind != "qwen3_moe"])
def test_a_new_adapter_is_the_embedded_backends_bit_by_bit(
    scene: Scene, references: References, request: pytest.FixtureRequest, plan: str
) -> None:
    results_of(plan, request)
    folder, _ = references.of(plan, False)
    ours, theirs = tensors(scene.scratch(plan, False) / "fresh"), tensors(folder / "fresh")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


@pytest.mark.parametrize("plan", [p for p, (kind, _) in PLANS.items() if kind == "qwen3_moe"])
def test_new_adapters_of_experts_are_the_same_under_every_plan(
    scene: Scene, request: pytest.FixtureRequest, plan: str
) -> None:
    results_of("ep2", request)
    results_of(plan, request)
    ours = tensors(scene.scratch(plan, False) / "fresh")
    first = tensors(scene.scratch("ep2", False) / "fresh")
    assert ours.keys() == first.keys()
    assert all(torch.equal(t, first[name]) for name, t in ours.items())
    for name, tensor in ours.items():
        if ".experts." in name:
            assert (tensor == 0).all() if "lora_B" in name else tensor.abs().max() > 0.05
            assert 2 in tensor.shape, "half of the other rank, as planned"
            assert tensor.abs().max() <= tensor.shape[1] ** -0.5


# ---- what a rank does besides

JOBS: list[Callable[[Scene], dict[str, Job]]] = []


def job(function: Callable[[Scene], dict[str, Job]]) -> Callable[[Scene], dict[str, Job]]:
    JOBS.append(function)
    return function


def overflowing() -> TrainBatch:
    """Two micro-batches of good datums and one whose loss is infinite."""
    good = data_for("importance_sampling", [40, 40, 40], 13)
    inputs = {**good.data[2].inputs, "logprobs": np.full(40, -2000.0, np.float32)}
    inputs["advantages"] = np.ones(40, np.float32)
    bad = Datum(good.data[2].tokens, inputs)
    return TrainBatch((*good.data[:2], bad), good.loss_fn, good.loss_fn_config)


def shown(scratch: Path, name: str) -> list[Op]:
    """Look at the accumulated gradient, and at everything else."""
    return [("step", name, SHOW_GRADIENT), ("save", name, scratch / name, True)]


@job
def refusals(scene: Scene) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for plan, full in (("tp2", False), ("dp2", False), ("dp2", True), ("pp2", False)):
        out = scene.scratch("refusals", plan, full)
        jobs[f"refusals {plan} {full}"] = scene.job(plan, refusal_script(out, full), full=full)
    return jobs


def refusal_script(out: Path, full: bool) -> list[Op]:
    spec = lora(rank=0) if full else lora()
    warm: list[Op] = [("fb", "m", GOOD), ("step", "m", STEP)]
    again: list[Op] = [("delete", "m"), ("create", "m", spec), *warm]
    bad: Op = ("fb", "m", overflowing())
    plain: list[Op] = [("save", "m", out / "m", True)]
    return [
        ("create", "m", spec), *warm, ("fb", "m", MORE), ("step", "m", SHOW_GRADIENT),
        ("save", "m", out / "without", True),
        *again, bad, ("fb", "m", MORE), ("step", "m", SHOW_GRADIENT),
        ("save", "m", out / "refused first", True),
        *again, ("fb", "m", MORE), bad, ("step", "m", SHOW_GRADIENT),
        ("save", "m", out / "refused last", True),
        *again, ("fb", "m", MORE), ("forward", "m", GOOD), ("step", "m", SHOW_GRADIENT),
        ("save", "m", out / "forward only", True),
        *again, *plain, ("fb", "m", MORE), ("poison", "m"), ("step", "m", STEP),
        ("save", "m", out / "poisoned", True), ("step", "m", STEP),
    ]  # fmt: skip


REFUSALS = ["tp2 False", "dp2 False", "dp2 True", "pp2 False"]


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("when", ["refused first", "refused last"])
def test_a_loss_that_is_not_finite_leaves_everything_bit_by_bit_as_before(
    scene: Scene, on_two: Results, case: str, when: str
) -> None:
    failed = [r for r in on_two[f"refusals {case}"] if isinstance(r, Failed)]
    for failure in failed[:2]:
        assert failure.kind == "UserError"
        assert "importance_sampling loss of datum 2 is -inf" in failure.text
    out = scene.scratch("refusals", *case.split())
    assert_equal(out / when, out / "without")


@pytest.mark.parametrize("case", REFUSALS)
def test_forward_only_touches_no_accumulator(scene: Scene, on_two: Results, case: str) -> None:
    out = scene.scratch("refusals", *case.split())
    assert_equal(out / "forward only", out / "without")


@pytest.mark.parametrize("case", REFUSALS)
def test_a_gradient_that_is_not_finite_is_dropped_and_nothing_else_changes(
    scene: Scene, on_two: Results, case: str
) -> None:
    results = on_two[f"refusals {case}"]
    assert results[-3].kind == "UserError"
    assert "the accumulated gradient is not finite" in results[-3].text
    out = scene.scratch("refusals", *case.split())
    assert_equal(out / "poisoned", out / "m")
    assert results[-1] == {"unclipped_grad_l2:mean": 0.0, "clipped_grad_l2:mean": 0.0}


def test_the_outputs_of_forward_only_are_those_of_training(on_two: Results, scene: Scene) -> None:
    script = refusal_script(scene.root, False)
    index = next(i for i, op in enumerate(script) if op[0] == "forward")
    for case in ("tp2 False", "pp2 False"):
        results = on_two[f"refusals {case}"]
        assert len(results[index].outputs) == len(GOOD.data)
        assert all(np.isfinite(o["logprobs"]).all() for o in results[index].outputs)


@job
def calls_add_up(scene: Scene) -> dict[str, Job]:
    def script(out: Path, full: bool) -> list[Op]:
        spec = lora(rank=0) if full else lora()
        union = TrainBatch(
            (*GOOD.data, *data_for("cross_entropy", [3, 8, 2], 14).data), "cross_entropy"
        )
        first, second = union.data[:3], union.data[3:]
        begin: list[Op] = [("create", "m", spec), ("fb", "m", GOOD), ("step", "m", STEP)]
        return [
            *begin, ("fb", "m", union), ("step", "m", SHOW_GRADIENT),
            ("save", "m", out / "one", True),
            ("delete", "m"), *begin, ("fb", "m", TrainBatch(first, "cross_entropy")),
            ("fb", "m", TrainBatch(second, "cross_entropy")), ("step", "m", SHOW_GRADIENT),
            ("save", "m", out / "two", True),
        ]  # fmt: skip

    return {
        f"sum {plan} {full}": scene.job(
            plan, script(scene.scratch("sum", plan, full), full), full=full
        )
        for plan in ("tp2", "dp2", "cp2", "pp2")
        for full in (False, True)
    }


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("plan", ["tp2", "dp2", "cp2", "pp2"])
def test_gradients_of_two_calls_add_up_to_those_of_the_union(
    scene: Scene, on_two: Results, plan: str, full: bool
) -> None:
    out = scene.scratch("sum", plan, full)
    one, two = tensors(out / "one"), tensors(out / "two")
    shown_gradient = {n: t for n, t in one.items() if n.startswith("exp_avg.")}
    assert_close({n: two[n] for n in shown_gradient}, shown_gradient)


@job
def interleaved(scene: Scene) -> dict[str, Job]:
    """Two models alone, and mixed while only one fits in device memory."""
    batch = {"a": [GOOD, MORE, GOOD], "b": [MORE, GOOD, MORE]}
    specs = {"a": lora(seed=1), "b": lora(rank=8, seed=2)}

    def turn(name: str, i: int, as_: str) -> list[Op]:
        return [("fb", as_, batch[name][i]), ("step", as_, STEP)]

    def script(out: Path) -> list[Op]:
        alone: list[Op] = [("base",)]
        for name in "ab":
            alone.append(("create", name, specs[name]))
            alone += [op for i in range(3) for op in turn(name, i, name)]
            alone.append(("save", name, out / name, True))
            alone.append(("delete", name))
        mixed: list[Op] = [("create", f"{n}2", specs[n]) for n in "ab"]
        mixed += [
            *turn("a", 0, "a2"), *turn("b", 0, "b2"), *turn("b", 1, "b2"),
            ("fb", "a2", batch["a"][1]), *turn("b", 2, "b2"), ("step", "a2", STEP),
            *turn("a", 2, "a2"),
        ]  # fmt: skip
        saved: list[Op] = [("save", f"{n}2", out / f"{n}2", True) for n in "ab"]
        return [*alone, *mixed, *saved, ("base",)]

    return {
        f"mixed {plan}": scene.job(plan, script(scene.scratch("mixed", plan)), resident=1)
        for plan in ("tp2", "dp2", "pp2", "ep2")
    }


@pytest.mark.parametrize("plan", ["tp2", "dp2", "pp2", "ep2"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_two_models_interleaved_equal_each_alone_bit_by_bit(
    scene: Scene, on_two: Results, plan: str, name: str
) -> None:
    out = scene.scratch("mixed", plan)
    assert_equal(out / f"{name}2", out / name)


@pytest.mark.parametrize("plan", ["tp2", "dp2", "pp2", "ep2"])
def test_training_adapters_leaves_the_base_bitwise_unchanged(on_two: Results, plan: str) -> None:
    results = on_two[f"mixed {plan}"]
    assert results[0] == results[-1]
