"""Checkpoints across plans and backends, exports, and device memory, on real Megatron ranks.

All jobs run in one start of two processes; the tests read their results.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cluster.rank_plans import MICROBATCH_TOKENS
from tests.cluster.rank_scene import GOOD, MORE, PLANS, STEP, Scene, assert_equal
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

BEFORE: list[Op] = [("fb", "m", GOOD), ("step", "m", STEP), ("fb", "m", MORE), ("step", "m", STEP)]
AFTER: list[Op] = [("fb", "m", MORE), ("step", "m", STEP), ("fb", "m", GOOD), ("step", "m", STEP)]
LAST = data_for("cross_entropy", [20, 7], 21)

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
        for whole in (False, True):
            embedded_part(scene, kind, whole)
    jobs: Jobs = {}
    for add in JOBS:
        jobs |= add(scene)
    return play(jobs)


def spec_of(whole: bool) -> Any:
    return lora(rank=0) if whole else lora()


# ---- resuming elsewhere

MOVES = [("tp2", "dp2"), ("dp2", "tp2"), ("ep2", "ep2"), ("pp2", "cp2")]
KIND_PLAN = {"llama": "tp2", "qwen3": "pp2"}


def embedded_part(scene: Scene, kind: str, whole: bool) -> None:
    """Uninterrupted, and a checkpoint in the middle."""
    out = scene.scratch("embedded", kind, whole)
    script: list[Op] = [
        ("create", "m", spec_of(whole)), *BEFORE, ("save", "m", out / "middle", True), *AFTER,
        ("save", "m", out / "end", True),
    ]  # fmt: skip
    Embedded(scene.folders[kind], out / "versions").play(script)


@job
def moves(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for first, second in MOVES:
        for whole in (False, True):
            out = scene.scratch("move", first, whole)
            there: list[Op] = [
                ("create", "m", spec_of(whole)), *BEFORE, ("save", "m", out / "middle", True),
                *AFTER, ("save", "m", out / "uninterrupted", True),
            ]  # fmt: skip
            here: list[Op] = [("load", "m", out / "middle", True), *AFTER,
                              ("save", "m", out / "moved", True)]  # fmt: skip
            jobs[f"from {first} {whole}"] = scene.job(first, there, whole=whole)
            jobs[f"move {first} {whole}"] = scene.job(second, here, whole=whole)
    return jobs


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("first", "second"), MOVES)
def test_a_checkpoint_of_one_plan_goes_on_under_another(
    scene: Scene, results: dict[str, list[Any]], first: str, second: str, whole: bool
) -> None:
    assert results[f"move {first} {whole}"][0] == spec_of(whole)
    out = scene.scratch("move", first, whole)
    assert_close(tensors(out / "moved"), tensors(out / "uninterrupted"))
    if first == second:
        assert_equal(out / "moved", out / "uninterrupted")


@job
def from_embedded(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for kind, plan in KIND_PLAN.items():
        for whole in (False, True):
            out = scene.scratch("embedded", kind, whole)
            script: list[Op] = [("load", "m", out / "middle", True), *AFTER,
                                ("save", "m", out / "here", True)]  # fmt: skip
            jobs[f"embedded {kind} {whole}"] = scene.job(plan, script, whole=whole)
    return jobs


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KIND_PLAN)
def test_a_checkpoint_of_the_embedded_backend_goes_on_here(
    scene: Scene, results: dict[str, list[Any]], kind: str, whole: bool
) -> None:
    out = scene.scratch("embedded", kind, whole)
    assert_close(tensors(out / "here"), tensors(out / "end"))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("plan", ["tp2", "pp2"])
def test_a_checkpoint_from_here_goes_on_in_the_embedded_backend(
    scene: Scene, results: dict[str, list[Any]], plan: str, whole: bool, tmp_path: Path
) -> None:
    out = scene.scratch("move", plan, whole)
    there = Embedded(scene.folders[PLANS[plan][0]], tmp_path / "versions")
    there.play([("load", "m", out / "middle", True), *AFTER, ("save", "m", tmp_path / "end", True)])
    assert_close(tensors(tmp_path / "end"), tensors(out / "uninterrupted"))


# ---- device memory


@job
def memory(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for plan, whole, dtype in (
        ("tp2", False, "float32"), ("dp2", True, "float32"), ("pp2", True, "bfloat16"),
        ("dp2", False, "bfloat16"),
    ):  # fmt: skip
        out = scene.scratch("memory", plan, whole)
        begin: list[Op] = [("create", "m", spec_of(whole)), *BEFORE, ("fb", "m", GOOD)]
        away: list[Op] = [("stats",), ("offload",), ("sizes",), ("stats",), ("onload",), ("stats",)]
        end: list[Op] = [("fb", "m", MORE), ("step", "m", STEP)]
        script = [
            *begin, *end, ("save", "m", out / "stayed", True), ("delete", "m"),
            *begin, *away, *end, *away, ("save", "m", out / "went", True),
        ]  # fmt: skip
        jobs[f"memory {plan} {whole}"] = scene.job(plan, script, whole=whole, dtype=dtype)
    return jobs


MEMORY = [("tp2", False), ("dp2", True), ("pp2", True), ("dp2", False)]


@pytest.mark.parametrize(("plan", "whole"), MEMORY)
def test_training_goes_on_bit_by_bit_after_the_weights_were_away(
    scene: Scene, results: dict[str, list[Any]], plan: str, whole: bool
) -> None:
    out = scene.scratch("memory", plan, whole)
    assert_equal(out / "went", out / "stayed")


@pytest.mark.parametrize(("plan", "whole"), MEMORY)
def test_offload_frees_all_that_stats_counts_and_onload_takes_it_back(
    scene: Scene, results: dict[str, list[Any]], plan: str, whole: bool
) -> None:
    *_, before, freed, sizes, away, taken, after, _ = results[f"memory {plan} {whole}"]
    for rank in range(2):
        assert freed[rank] == taken[rank] == sum(before[rank].values())
        assert sizes[rank] == 0
        assert sum(away[rank].values()) == 0
        assert after[rank] == before[rank]
        assert all(size > 0 for size in before[rank].values())


def test_adapters_gradients_and_optimizer_states_are_float32_beside_a_bfloat16_base(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    for plan, whole in (("pp2", True), ("dp2", False)):
        saved = tensors(scene.scratch("memory", plan, whole) / "stayed")
        assert all(tensor.dtype == torch.float32 for tensor in saved.values())
        trained = [t for name, t in saved.items() if not name.startswith("exp_avg")]
        assert any(not torch.equal(t, t.bfloat16().float()) for t in trained)


def test_a_bfloat16_model_has_the_losses_of_the_float32_model_within_its_rounding(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    for plan, whole in (("pp2", True), ("dp2", False)):
        rough = results[f"memory {plan} {whole}"][1]
        fine = results[f"from {plan} {whole}"][1]
        for a, b in zip(rough.outputs, fine.outputs, strict=True):
            assert np.abs(a["logprobs"] - b["logprobs"]).mean() < 0.05


# ---- for engines


@job
def exports(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for plan, whole in EXPORTS:
        out = scene.scratch("export", plan, whole)
        script: list[Op] = [
            ("buckets", None), ("checksum", None), ("create", "m", spec_of(whole)), *BEFORE,
            ("forward", "m", LAST), ("export", "m", out / "merged", "merged"), ("buckets", "m"),
            ("checksum", "m"), ("export", "m", out / "adapter", "adapter"),
        ]  # fmt: skip
        jobs[f"export {plan} {whole}"] = scene.job(plan, script, whole=whole)
    return jobs


EXPORTS = [
    ("tp2", False), ("pp2", False), ("dp2", False), ("tied pp2", False), ("tied tp2", False),
    ("ep2", False), ("tp2", True), ("ep2", True), ("tied pp2", True),
]  # fmt: skip
AT = {name: i for i, name in enumerate(
    ("base", "base sum", "create", "fb", "step", "fb 2", "step 2", "forward", "export", "merged",
     "merged sum", "adapter"))}  # fmt: skip


def logprobs_of(model: torch.nn.Module) -> list[np.ndarray]:
    found = []
    for datum in LAST.data:
        tokens = torch.from_numpy(datum.tokens.astype(np.int64))[None]
        with torch.no_grad():
            scores = torch.log_softmax(model(tokens).logits[0], -1)
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        found.append(scores.gather(1, targets)[:, 0].numpy())
    return found


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(("plan", "whole"), EXPORTS)
def test_transformers_computes_with_an_export_what_the_trainer_computes(
    scene: Scene, results: dict[str, list[Any]], plan: str, whole: bool
) -> None:
    output = results[f"export {plan} {whole}"][AT["forward"]]
    model = loaded(scene.scratch("export", plan, whole) / "merged")
    for ours, theirs in zip(output.outputs, logprobs_of(model), strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs, atol=3e-5)


@pytest.mark.parametrize("plan", ["tp2", "pp2", "dp2", "tied pp2"])
def test_peft_computes_with_an_exported_adapter_what_the_trainer_computes(
    scene: Scene, results: dict[str, list[Any]], plan: str
) -> None:
    output = results[f"export {plan} False"][AT["forward"]]
    kind, _ = PLANS[plan]
    base = AutoModelForCausalLM.from_pretrained(scene.folders[kind], dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of adapters on tied embeddings
        model = PeftModel.from_pretrained(base, scene.scratch("export", plan, False) / "adapter")
    for ours, theirs in zip(output.outputs, logprobs_of(model), strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs, atol=3e-5)


@pytest.mark.parametrize(("plan", "whole"), EXPORTS)
def test_buckets_of_the_base_are_the_tensors_of_its_folder(
    scene: Scene, results: dict[str, list[Any]], plan: str, whole: bool
) -> None:
    ours = results[f"export {plan} {whole}"][AT["base"]]
    theirs = load_file(scene.folders[PLANS[plan][0]] / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_checksum_is_the_same_under_every_plan_and_changes_with_the_weights(
    results: dict[str, list[Any]],
) -> None:
    by_plan = [
        results[f"export {plan} {whole}"] for plan, whole in (("tp2", False), ("dp2", False))
    ]
    assert by_plan[0][AT["base sum"]] == by_plan[1][AT["base sum"]]
    assert by_plan[0][AT["base sum"]] != by_plan[0][AT["merged sum"]]


def test_a_model_trained_whole_has_no_adapter_to_export(results: dict[str, list[Any]]) -> None:
    assert results["export tp2 True"][AT["adapter"]].kind == "UserError"


# ---- what is refused


@job
def refused(scene: Scene) -> Jobs:
    out = scene.scratch("refused")
    long = data_for("cross_entropy", [3, MICROBATCH_TOKENS + 1], 1)
    small: list[Op] = [
        ("create", "m", lora()), ("fb", "m", long), ("create", "big", lora(rank=9)),
        ("step", "unknown", STEP), ("save", "m", out / "bare", False),
        ("load", "x", out / "bare", True), ("load", "x", out / "nothing", False),
        ("delete", "m"), ("step", "m", STEP),
    ]  # fmt: skip
    whole: list[Op] = [
        ("create", "m", lora()), ("create", "m", lora(rank=0)), ("create", "n", lora(rank=0)),
        ("load", "m", out / "bare", False), ("delete", "m"), ("create", "n", lora(rank=0)),
        ("save", "n", out / "n", False), ("fb", "n", GOOD), ("step", "n", STEP), ("delete", "n"),
        ("create", "m", lora(rank=0)), ("save", "m", out / "m", False),
    ]  # fmt: skip
    return {
        "refused lora": scene.job("tp2", small),
        "refused whole": scene.job("dp2", whole, whole=True),
    }


def failure(result: Any) -> str:
    assert isinstance(result, Failed), result
    return f"{result.kind}: {result.text}"


def test_what_cannot_be_served_is_refused_on_every_rank(results: dict[str, list[Any]]) -> None:
    found = results["refused lora"]
    assert "UserError: datum 1 has 49 tokens" in failure(found[1])
    assert "UserError: rank 9 is not served here" in failure(found[2])
    assert "ModelStateLost" in failure(found[3])
    assert "no optimizer state" in failure(found[5])
    assert "not a checkpoint" in failure(found[6])
    assert "ModelStateLost" in failure(found[8])


def test_one_model_at_a_time_is_trained_whole(results: dict[str, list[Any]]) -> None:
    found = results["refused whole"]
    assert "ask for rank 0" in failure(found[0])
    assert "another model is trained whole" in failure(found[2])
    assert "ask for rank 0" in failure(found[3])
    assert found[5] is None


def test_after_a_model_was_trained_whole_the_next_starts_from_the_base(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    out = scene.scratch("refused")
    assert_equal(out / "m", out / "n")
    base = load_file(scene.folders["llama"] / "model.safetensors")
    saved = tensors(out / "m")
    assert all(torch.equal(saved[n.removesuffix(".weight")], t) for n, t in base.items())


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


def test_outputs_after_a_move_are_those_before(results: dict[str, list[Any]]) -> None:
    for first, _ in MOVES:
        there, here = results[f"from {first} False"], results[f"move {first} False"]
        assert_same_output(here[1], there[6])
