"""Hugging Face weights on Megatron's ranks, and back: against transformers, for every architecture
that trains and every way of cutting it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.cluster.cpu import spawn
from tests.cluster.cpu.tiny import KINDS, write_model
from tests.cluster.plans import tiny_plan
from tinkercloud.planning.plan import Plan
from tinkercloud.weights.huggingface import ensure_hf_folder

EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 + sequence parallel": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2 x pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 x ep2": (2, {"tp": 2, "ep": 2}),
    "etp2": (2, {"tp": 2, "etp": 2}),
}
# The others hold all that these do, each together with something else (cp2 cuts no weights; its
# numbers are test_training's).
SIMPLE = ("one rank", "tp2 + sequence parallel", "pp2", "cp2", "ep2")
LENGTHS = (1, 7, 24, 33)  # of the packed sequences

Case = tuple[str, Path, Plan]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[np.ndarray]]:
    return {kind: list(theirs(folder)) for kind, folder in folders.items()}


def cases(folders: dict[str, Path], name: str) -> tuple[int, list[Case]]:
    ranks, constraints = PLANS[name]
    kinds = EXPERTS if {"ep", "etp"} & constraints.keys() else tuple(KINDS)
    if ranks == 4:  # each way of cutting has met every architecture by itself
        kinds = ("llama", "llama_tied", "qwen3", "qwen3_moe")
    return ranks, [(k, folders[k], tiny_plan(folders[k], ranks, **constraints)) for k in kinds]


def sequences(vocab_size: int = 259) -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, vocab_size, n + 1).astype(np.int32) for n in LENGTHS]


def converted(
    rank: int, world_size: int, init_method: str, found: list[Case], out: Path
) -> dict[str, Any]:
    """For every model: log-probabilities of the sequences, and the export, written by rank 0."""
    from tinkercloud.cluster.cpu.ranks import prepare

    hooks = prepare()
    from tinkercloud.cluster.training import megatron_model
    from tinkercloud.cluster.training.rank_forward import BatchRunner
    from tinkercloud.cluster.weights import conversion as weight_io
    from tinkercloud.core.types import Datum, TrainBatch

    megatron_model.initialize(
        found[0][2].megatron, rank, world_size, init_method, hooks, timeout_s=60
    )
    data = tuple(
        Datum(s[:-1], {"target_tokens": s[1:].astype(np.int64), "weights": np.ones(len(s) - 1)})
        for s in sequences()
    )
    answers = {}
    for kind, folder, plan in found:
        model = megatron_model.build_model(plan.megatron, hooks)
        catalogue = weight_io.Catalogue(model, plan.megatron, plan.architecture)
        weight_io.load_base(model, catalogue, folder)
        runner = BatchRunner(model, plan, torch.device("cpu"), torch.distributed.group.WORLD)
        output = runner.run(TrainBatch(data, "cross_entropy"), backward=False)
        writer = weight_io.HuggingFaceWriter(out / kind, folder)
        for bucket in weight_io.full_tensors(catalogue, catalogue.tensors.__getitem__, 50_000):
            if rank == world_size - 1:  # every rank has them; the last stage's are the furthest
                writer.add(bucket)
        if rank == world_size - 1:
            writer.finish()
        answers[kind] = None if output is None else dict(
            zip(output.indices, output.outputs, strict=True)
        )  # fmt: skip
    return answers


def theirs(folder: Path) -> Iterator[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for tokens in sequences():
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0].double()
        yield torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SIMPLE)) for n in PLANS]
)
def test_the_sharded_model_computes_as_transformers_and_unshards_to_the_same_tensors(
    name, folders, expected, tmp_path
):
    ranks, found = cases(folders, name)
    for kind, _, _ in found:
        (tmp_path / kind).mkdir()
    answers = spawn.run(converted, ranks, found, tmp_path)
    for kind, folder, _ in found:
        told: dict[int, Any] = {}
        for answer in answers:
            told |= answer[kind] or {}
        for i, logprobs in enumerate(expected[kind]):
            np.testing.assert_allclose(told[i]["logprobs"], logprobs, atol=1e-5, err_msg=kind)
        original = load_file(folder / "model.safetensors")
        exported = load_file(tmp_path / kind / "model-00001.safetensors")
        for key, tensor in original.items():
            assert torch.equal(exported.pop(key), tensor), f"{kind}: {key}"
        assert not exported, kind


def test_transformers_loads_what_was_exported(folders, expected, tmp_path):
    kinds = ("llama_tied", "qwen3_moe")
    found = [(kind, folders[kind], tiny_plan(folders[kind], 1)) for kind in kinds]
    for kind in kinds:
        (tmp_path / kind).mkdir()
    spawn.run(converted, 1, found, tmp_path)
    for kind in kinds:
        for logprobs, again in zip(expected[kind], theirs(tmp_path / kind), strict=True):
            np.testing.assert_array_equal(again, logprobs)


def test_stages_may_be_uneven(tmp_path):
    folder = write_model("qwen3", tmp_path / "model", num_hidden_layers=3)
    (tmp_path / "out" / "three").mkdir(parents=True)
    found = [("three", folder, tiny_plan(folder, 2, pp=2))]
    assert found[0][2].megatron.num_layers_in_last_pipeline_stage == 1
    answers = spawn.run(converted, 2, found, tmp_path / "out")
    told = answers[0]["three"] or answers[1]["three"]
    for i, expected in enumerate(theirs(folder)):
        np.testing.assert_allclose(told[i]["logprobs"], expected, atol=1e-5)


def test_heads_in_a_wrong_order_are_detected(tmp_path):
    """The comparison above is worth something only if a wrong mapping fails it."""
    folder = write_model("qwen3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].view(4, 16, -1)[[1, 0, 2, 3]].flatten(0, 1).contiguous()
    expected = list(theirs(folder))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out" / "wrong").mkdir(parents=True)
    plan = tiny_plan(folder, 1)
    (answer,) = spawn.run(converted, 1, [("wrong", folder, plan)], tmp_path / "out")
    assert (
        max(np.abs(answer["wrong"][i]["logprobs"] - e).max() for i, e in enumerate(expected)) > 0.01
    )


def refused(rank: int, world_size: int, init_method: str, plan: Plan, folders: list[Path]) -> list:
    from tinkercloud.cluster.cpu.ranks import prepare

    hooks = prepare()
    from tinkercloud.cluster.training import megatron_model
    from tinkercloud.cluster.weights import conversion as weight_io
    from tinkercloud.errors import ConfigError

    megatron_model.initialize(plan.megatron, rank, world_size, init_method, hooks, timeout_s=60)
    model = megatron_model.build_model(plan.megatron, hooks)
    catalogue = weight_io.Catalogue(model, plan.megatron, plan.architecture)
    told = []
    for folder in folders:
        with pytest.raises(ConfigError) as caught:
            weight_io.load_base(model, catalogue, folder)
        told.append(str(caught.value))
    return told


def test_a_folder_that_does_not_fit_its_config_is_refused_with_the_names(tmp_path):
    whole = write_model("llama", tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    changed = {
        "missing": {k: t for k, t in tensors.items() if k != name},
        "unexpected": {**tensors, "model.layers.0.extra.weight": torch.zeros(2)},
        "too small": {**tensors, name: torch.zeros(64, 64)},
        "too large": {**tensors, name: torch.zeros(256, 64)},
    }
    folders = []
    for what, content in changed.items():
        folder = tmp_path / what
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
        folders.append(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    (told,) = spawn.run(refused, 1, tiny_plan(whole, 1), [*folders, empty])
    assert "missing: " + name in told[0]
    assert "unexpected: model.layers.0.extra.weight" in told[1]
    assert f"{name} is (64, 64), not (128, 64)" in told[2]
    assert f"{name} is (256, 64), not (128, 64)" in told[3]
    assert "no safetensors" in told[4]


def test_bfloat16_weights_are_gathered_bit_by_bit(tmp_path):
    folder = write_model("qwen3", tmp_path / "model")
    plan = tiny_plan(folder, 1, dtype="bfloat16")
    assert plan.megatron.dtype == "bfloat16"
    (tmp_path / "out" / "narrow").mkdir(parents=True)
    spawn.run(converted, 1, [("narrow", folder, plan)], tmp_path / "out")
    original = load_file(folder / "model.safetensors")
    exported = load_file(tmp_path / "out" / "narrow" / "model-00001.safetensors")
    assert all(torch.equal(exported[k], t.bfloat16()) for k, t in original.items())


def test_the_small_model_on_two_stages_computes_as_transformers(smollm2_gguf, tmp_path):
    """Real weights, tied, unpacked from a GGUF file; their logits are about 20, hence the 5e-5."""
    folder = ensure_hf_folder(smollm2_gguf, tmp_path / "cache")
    (tmp_path / "out" / "small").mkdir(parents=True)
    found = [("small", folder, tiny_plan(folder, 2, pp=2))]
    answers = spawn.run(converted, 2, found, tmp_path / "out")
    told = answers[0]["small"] or answers[1]["small"]
    for i, expected in enumerate(theirs(folder)):
        np.testing.assert_allclose(told[i]["logprobs"], expected, atol=5e-5)
    exported = load_file(tmp_path / "out" / "small" / "model-00001.safetensors")
    original = load_file(folder / "model-00000.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
