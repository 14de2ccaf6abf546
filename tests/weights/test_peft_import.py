"""PEFT's adapters as ours: the same product of A and B, or a refusal with its reason."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.embedded.tiny import write_tiny_model
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError
from tinkercloud.weights.adapters import adapted_modules, fresh_adapter, load_adapter, save_adapter
from tinkercloud.weights.checkpoints import read_state
from tinkercloud.weights.loader import read_config
from tinkercloud.weights.peft_import import ImportedAdapter, import_adapter, write_imported

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`",
    "ignore:`lora_bias=True` was passed", "ignore:Adapter 'default'",
)  # fmt: skip
CPU = torch.device("cpu")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def network(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def saved(network: Any, folder: Path, **fields: Any) -> Any:
    """PEFT's model with random A and B, and its two files in the folder."""
    torch.manual_seed(0)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | fields
    config = LoraConfig(task_type="CAUSAL_LM", **fields)
    model = get_peft_model(copy.deepcopy(network), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return model


def deltas_of_peft(model: Any) -> dict[str, Tensor]:
    """Module -> what PEFT adds to its weight."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def deltas_of(imported: ImportedAdapter) -> dict[str, Tensor]:
    scale = imported.spec.alpha / imported.spec.rank
    return {name: scale * (b @ a) for name, (a, b) in imported.adapter.items()}


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"target_modules": ATTENTION}, (4, 8, True, False, False)),
        ({"target_modules": "all-linear"}, (4, 8, True, True, False)),
        ({"target_modules": [*ATTENTION, *MLP, "lm_head"]}, (4, 8, True, True, True)),
        ({"target_modules": ["lm_head"]}, (4, 8, False, False, True)),
        ({"target_modules": ["up_proj"], "lora_alpha": 0.3}, (4, 0.3, False, True, False)),
        ({"target_modules": ["up_proj"], "lora_alpha": 0}, (4, 0, False, True, False)),
        ({"use_rslora": True}, (4, 16, True, False, False)),
        ({"layers_to_transform": [1]}, (4, 8, True, False, False)),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 6}}, (6, 12, True, False, False)),
        (
            {"target_modules": ["q_proj", "k_proj"], "alpha_pattern": {"k_proj": 5}},
            (4, 8, True, False, False),
        ),
        (
            {"use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 1}},
            (4, 32, True, False, False),
        ),
        ({"bias": "lora_only", "lora_dropout": 0.5}, (4, 8, True, False, False)),
    ],
    ids=str,
)
def test_an_import_adds_to_each_weight_what_peft_adds(
    base: Path, network: Any, tmp_path: Path, fields: dict[str, Any], spec: tuple[Any, ...]
) -> None:
    expected = deltas_of_peft(saved(network, tmp_path, **fields))
    imported = import_adapter(tmp_path, base)
    got = imported.spec
    assert (got.rank, got.alpha) == pytest.approx(spec[:2])
    assert (got.train_attn, got.train_mlp, got.train_unembed) == spec[2:]
    deltas = deltas_of(imported)
    assert list(deltas) == adapted_modules(got, read_config(base).linear_shapes())
    for name, delta in deltas.items():
        zero = torch.zeros_like(delta)
        torch.testing.assert_close(delta, expected.get(name, zero), rtol=1e-5, atol=1e-5)
    assert expected.keys() <= deltas.keys()


def test_an_import_that_needs_no_change_has_the_same_bits(
    base: Path, network: Any, tmp_path: Path
) -> None:
    saved(network, tmp_path, target_modules=[*ATTENTION, *MLP, "lm_head"], lora_alpha=7)
    imported = import_adapter(tmp_path, base)
    target = tmp_path / "checkpoint"
    target.mkdir()
    write_imported(imported, "tiny", target)
    ours, theirs = load_file(target / TENSORS), load_file(tmp_path / TENSORS)
    theirs = {name: t for name, t in theirs.items() if ".lora_" in name}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    state = read_state(target)
    assert (state.lora, state.has_optimizer, state.num_steps) == (imported.spec, False, 0)


def test_what_is_padded_can_be_trained(base: Path, network: Any, tmp_path: Path) -> None:
    """B is 0 there and A is not: the gradient of B is not zero."""
    saved(network, tmp_path, rank_pattern={"layers.0.self_attn.q_proj": 2})
    adapter = import_adapter(tmp_path, base).adapter
    a, b = adapter["model.layers.0.self_attn.q_proj"]
    assert torch.count_nonzero(b[:, 2:]) == 0
    assert torch.count_nonzero(a[2:]) == a[2:].numel()
    a, b = adapter["model.layers.1.self_attn.o_proj"]
    assert (torch.count_nonzero(a), torch.count_nonzero(b)) == (a.numel(), 0)


@pytest.mark.parametrize("number_type", [torch.bfloat16, torch.float16])
def test_shorter_number_types_are_widened(
    base: Path, network: Any, tmp_path: Path, number_type: torch.dtype
) -> None:
    saved(network, tmp_path, target_modules=ATTENTION)
    tensors = {n: t.to(number_type) for n, t in load_file(tmp_path / TENSORS).items()}
    save_file(tensors, tmp_path / TENSORS)
    a, _ = import_adapter(tmp_path, base).adapter["model.layers.0.self_attn.q_proj"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(a, tensors[name].float())


def test_our_own_export_comes_in_again_as_it_was(base: Path, tmp_path: Path) -> None:
    shapes = read_config(base).linear_shapes()
    spec = LoraSpec(3, 5, train_unembed=False)
    adapter = {
        n: (a, torch.randn_like(b)) for n, (a, b) in fresh_adapter(spec, shapes, CPU).items()
    }
    save_adapter(adapter, spec, "tiny", tmp_path)
    imported = import_adapter(tmp_path, base)
    again = load_adapter(tmp_path, imported.spec, shapes, CPU)
    for name, (a, b) in adapter.items():
        assert torch.equal(a, again[name][0])
        assert torch.equal(b, imported.adapter[name][1])
    assert imported.spec.alpha == spec.alpha


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "use_dora: DoRA scales the rows of the whole weight"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight: it replaces a base weight"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "it adapts the embeddings"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices: it changes embeddings"),
        ({"lora_bias": True}, "lora_bias: B has a bias"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication: it makes another network"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused_by_name(
    base: Path, network: Any, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    model = saved(network, tmp_path, **fields)
    if "modules_to_save" in fields:  # trained, say
        with torch.no_grad():
            model.lm_head.modules_to_save["default"].weight.add_(1)
        model.save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        import_adapter(tmp_path, base)
    assert reason in str(refused.value)


def test_copies_of_base_weights_are_taken_for_what_they_are(
    base: Path, network: Any, tmp_path: Path
) -> None:
    saved(network, tmp_path, modules_to_save=["lm_head"])
    assert import_adapter(tmp_path, base).spec.train_unembed is False


def test_copies_of_tied_embeddings_are_taken_for_what_they_are(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=60, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    network = LlamaForCausalLM(config)
    network.save_pretrained(tmp_path / "base")
    saved(network, tmp_path / "adapter", target_modules=["lm_head"])
    names = load_file(tmp_path / "adapter" / TENSORS)
    assert any(name.endswith("base_layer.weight") for name in names)
    assert import_adapter(tmp_path / "adapter", tmp_path / "base").spec.train_unembed


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(raw | changes))

    return edit


def with_tensors(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS)

    return edit


def halved(folder: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:99])


Q = "base_model.model.model.layers.0.self_attn.q_proj"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle": (
        lambda folder: (folder / TENSORS).rename(folder / "adapter_model.bin") and None,
        "pickled ones run code",
    ),
    "half a file": (halved, "cannot be read"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "cannot be read"),
    "no object": (lambda folder: (folder / CONFIG).write_text("[]") and None, "no JSON object"),
    "a huge config": (
        lambda folder: (folder / CONFIG).write_text(" " * 2_000_000) and None,
        "more than 1048576 bytes",
    ),
    "prompt tuning": (edited(peft_type="PROMPT_TUNING"), "only LORA is A and B"),
    "a classifier": (edited(task_type="SEQ_CLS"), "not CAUSAL_LM"),
    "pissa": (edited(init_lora_weights="pissa_niter_4"), "changes the base weights"),
    "transposed": (edited(fan_in_fan_out=True), "transposed"),
    "a field of a later PEFT": (edited(use_what_comes=True), "use_what_comes: its meaning"),
    "rank 0": (edited(r=0), "r is 0"),
    "a rank beyond": (edited(r=4096), "r is 4096"),
    "a rank that is no number": (edited(r="4"), "r is '4'"),
    "no finite alpha": (edited(lora_alpha=1e999), "no finite number"),
    "a pattern that is none": (edited(rank_pattern={"(": 2}), "no regular expression"),
    "a pattern's rank": (edited(rank_pattern={"q_proj": -1}), "rank_pattern['q_proj'] is -1"),
    "another rank than it says": (edited(r=3), "not (3, 48)"),
    "a missing B": (
        with_tensors(lambda t: t.__delitem__(f"{Q}.lora_B.weight")),
        f"{Q}.lora_B.weight is missing",
    ),
    "another width": (
        with_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 47)})),
        "is (4, 47), not (4, 48)",
    ),
    "whole numbers": (
        with_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 48).long()})),
        "is I64; taken: F32, BF16, F16",
    ),
    "no number": (
        with_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.full((4, 48), torch.nan)})),
        "are not finite",
    ),
    "a module more": (
        with_tensors(
            lambda t: t.update({f"{Q.replace('0', '7')}.lora_A.weight": torch.ones(4, 48)})
        ),
        "the base model has no such module",
    ),
    "a tensor more": (
        with_tensors(lambda t: t.update({"what": torch.ones(1)})),
        "what: no tensor of LoRA",
    ),
    "a trained norm": (
        with_tensors(lambda t: t.update({"base_model.model.model.norm.weight": torch.zeros(48)})),
        "model.norm.weight: it replaces a base weight",
    ),
    "no module": (lambda folder: save_file({}, folder / TENSORS), "adapts no linear module"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_is_wrong_with_an_adapter_is_said(
    base: Path, network: Any, tmp_path: Path, fault: str
) -> None:
    edit, text = FAULTS[fault]
    saved(network, tmp_path)
    edit(tmp_path)
    with pytest.raises(UserError) as refused:
        import_adapter(tmp_path, base)
    assert text in str(refused.value)


def test_many_faults_are_counted(base: Path, network: Any, tmp_path: Path) -> None:
    saved(network, tmp_path)
    extra = {f"what.{index}": torch.ones(1) for index in range(9)}
    save_file(load_file(tmp_path / TENSORS) | extra, tmp_path / TENSORS)
    with pytest.raises(UserError, match="and 4 more"):
        import_adapter(tmp_path, base)
