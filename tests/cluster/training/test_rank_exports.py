"""What ranks give to engines, and what they refuse, on real Megatron ranks.

All jobs run in one start of two processes; the tests read their results.
"""

import warnings
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
from tests.cluster.rank_scripts import Failed, Job, Op, data_for, lora, play, tensors

TRAINING: list[Op] = [
    ("fb", "m", GOOD), ("step", "m", STEP), ("fb", "m", MORE), ("step", "m", STEP),
]  # fmt: skip
LAST = data_for("cross_entropy", [20, 7], 21)

Jobs = dict[str, Job]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def results(scene: Scene) -> dict[str, list[Any]]:
    return play(exports(scene) | refused(scene))


def spec_of(full: bool) -> Any:
    return lora(rank=0) if full else lora()


# ---- for engines


def exports(scene: Scene) -> Jobs:
    jobs: Jobs = {}
    for plan, full in EXPORTS:
        out = scene.scratch("export", plan, full)
        script: list[Op] = [
            ("buckets", None), ("checksum", None), ("create", "m", spec_of(full)), *TRAINING,
            ("forward", "m", LAST), ("export", "m", out / "merged", "merged"), ("buckets", "m"),
            ("checksum", "m"), ("export", "m", out / "adapter", "adapter"),
        ]  # fmt: skip
        jobs[f"export {plan} {full}"] = scene.job(plan, script, full=full)
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


@pytest.mark.parametrize(("plan", "full"), EXPORTS)
def test_transformers_computes_with_an_export_what_the_trainer_computes(
    scene: Scene, results: dict[str, list[Any]], plan: str, full: bool
) -> None:
    output = results[f"export {plan} {full}"][AT["forward"]]
    model = loaded(scene.scratch("export", plan, full) / "merged")
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


@pytest.mark.parametrize(("plan", "full"), EXPORTS)
def test_buckets_of_the_base_are_the_tensors_of_its_folder(
    scene: Scene, results: dict[str, list[Any]], plan: str, full: bool
) -> None:
    ours = results[f"export {plan} {full}"][AT["base"]]
    theirs = load_file(scene.folders[PLANS[plan][0]] / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_checksum_is_the_same_under_every_plan_and_changes_with_the_weights(
    results: dict[str, list[Any]],
) -> None:
    by_plan = [results[f"export {plan} {full}"] for plan, full in (("tp2", False), ("dp2", False))]
    assert by_plan[0][AT["base sum"]] == by_plan[1][AT["base sum"]]
    assert by_plan[0][AT["base sum"]] != by_plan[0][AT["merged sum"]]


def test_a_full_parameter_model_has_no_adapter_to_export(results: dict[str, list[Any]]) -> None:
    assert results["export tp2 True"][AT["adapter"]].kind == "UserError"


# ---- what is refused


def refused(scene: Scene) -> Jobs:
    out = scene.scratch("refused")
    long = data_for("cross_entropy", [3, MICROBATCH_TOKENS + 1], 1)
    small: list[Op] = [
        ("create", "m", lora()), ("fb", "m", long), ("create", "big", lora(rank=9)),
        ("step", "unknown", STEP), ("save", "m", out / "bare", False),
        ("load", "x", out / "bare", True), ("load", "x", out / "nothing", False),
        ("delete", "m"), ("step", "m", STEP),
    ]  # fmt: skip
    full: list[Op] = [
        ("create", "m", lora()), ("create", "m", lora(rank=0)), ("create", "n", lora(rank=0)),
        ("load", "m", out / "bare", False), ("delete", "m"), ("create", "n", lora(rank=0)),
        ("save", "n", out / "n", False), ("fb", "n", GOOD), ("step", "n", STEP), ("delete", "n"),
        ("create", "m", lora(rank=0)), ("save", "m", out / "m", False),
    ]  # fmt: skip
    return {
        "refused lora": scene.job("tp2", small),
        "refused full": scene.job("dp2", full, full=True),
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


def test_one_full_parameter_model_is_trained_at_a_time(results: dict[str, list[Any]]) -> None:
    found = results["refused full"]
    assert "ask for rank 0" in failure(found[0])
    assert "another full-parameter model is trained" in failure(found[2])
    assert "ask for rank 0" in failure(found[3])
    assert found[5] is None


def test_after_a_full_parameter_model_the_next_one_starts_from_the_base(
    scene: Scene, results: dict[str, list[Any]]
) -> None:
    out = scene.scratch("refused")
    assert_equal(out / "m", out / "n")
    base = load_file(scene.folders["llama"] / "model.safetensors")
    saved = tensors(out / "m")
    assert all(torch.equal(saved[n.removesuffix(".weight")], t) for n, t in base.items())
