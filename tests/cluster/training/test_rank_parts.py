"""The training rank's parts that need no group of ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tinkercloud.cluster.training.host_store import HostStore, bytes_of
from tinkercloud.cluster.training.rank_types import BatchColumns, RankOutput, merge_outputs
from tinkercloud.cluster.weights.tensor_file import TensorFile
from tinkercloud.core.policy_metrics import policy_metrics
from tinkercloud.core.types import AdamParams, Datum, TrainBatch
from tinkercloud.embedded.training.optimizer import AdamW
from tinkercloud.losses import LOSSES

# What Megatron says of a machine without Apex and Transformer Engine, at its first import.
pytestmark = pytest.mark.filterwarnings("ignore")

# ---- storages that go to the host


def test_every_view_of_a_storage_is_restored_by_onload() -> None:
    flat = torch.arange(12.0)
    view, parameter = flat[3:9].view(2, 3), nn.Parameter(torch.randn(4))
    before = parameter.detach().clone()
    store = HostStore()
    assert store.offload([flat, view, parameter]) == 12 * 4 + 4 * 4
    assert bytes_of([flat, parameter]) == 0
    assert store.is_offloaded
    assert store.onload() == 12 * 4 + 4 * 4
    assert torch.equal(flat, torch.arange(12.0))
    assert torch.equal(view, torch.arange(3.0, 9.0).view(2, 3))
    assert torch.equal(parameter, before)
    flat[3] = 7
    assert view[0, 0] == 7


def test_zeros_are_restored_without_a_copy() -> None:
    gradient = torch.zeros(5)
    store = HostStore()
    assert store.offload([], zero=[gradient]) == 20
    store.onload()
    assert torch.equal(gradient, torch.zeros(5))


def test_constant_tensors_are_copied_to_the_host_once() -> None:
    weight = torch.ones(5)
    store = HostStore()
    for _ in range(2):
        assert store.offload([], constant=[weight]) == 20
        store.onload()
        assert torch.equal(weight, torch.ones(5))
    assert len(store._constant) == 1


# ---- a file written tensor by tensor


def test_a_streamed_file_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 4), "a": torch.randn(7), "empty": torch.zeros(0, 2)}
    file = TensorFile(tmp_path / "x", {name: tuple(t.shape) for name, t in tensors.items()})
    for name in ("a", "empty", "b"):  # in any order
        file.write(name, tensors[name])
    file.close()
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


def test_a_file_that_lacks_a_tensor_cannot_be_closed(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x", {"a": (2,), "b": (2,)})
    file.write("a", torch.zeros(2))
    with pytest.raises(AssertionError, match="never written"):
        file.close()


# ---- what goes to the ranks and comes back


def test_a_batch_equals_itself_after_packing_into_columns() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (2, 4), (1,), (5, 1)]
    numbers = np.random.default_rng(0)
    data = tuple(
        Datum(
            numbers.integers(0, 9, shape[0]).astype(np.int32),
            {
                "target_tokens": numbers.integers(0, 9, shape),
                "weights": numbers.random(shape, np.float32),
            },
        )
        for shape in shapes
    )
    sent = TrainBatch(data, "cross_entropy", {"a": 1.5}, forward_only=True)
    got = BatchColumns.of(sent).batch()
    assert (got.loss_fn, got.loss_fn_config, got.forward_only) == (
        "cross_entropy",
        {"a": 1.5},
        True,
    )
    for one, other in zip(got.data, sent.data, strict=True):
        same_array(one.tokens, other.tokens)
        assert one.inputs.keys() == other.inputs.keys()
        for name in one.inputs:
            same_array(one.inputs[name], other.inputs[name])


def same_array(one: np.ndarray, other: np.ndarray) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert (one == other).all()


def test_outputs_of_ranks_are_merged_in_request_order() -> None:
    outputs = [{"logprobs": torch.full((1,), float(i)).numpy()} for i in range(3)]
    metrics = {"loss:sum": 1.0}
    parts = [
        None,
        RankOutput((2, 0), (outputs[2], outputs[0]), metrics),
        RankOutput((1,), (outputs[1],), metrics),
    ]
    merged = merge_outputs(parts)
    assert [float(o["logprobs"][0]) for o in merged.outputs] == [0.0, 1.0, 2.0]
    assert merged.metrics == metrics


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_metrics_of_rl_are_the_same_however_datums_lie_on_ranks(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    rows = [
        (rng.normal(size=n).astype("f4"), {name: rng.normal(size=n).astype("f4") for name in
         ("logprobs", "advantages")})
        for n in (3, 9, 1, 5, 7)
    ]  # fmt: skip
    config = LOSSES["ppo"].defaults
    places = [tuple(map(int, part)) for part in np.array_split(rng.permutation(5), num_ranks)]
    parts = [
        RankOutput(place, tuple({"logprobs": rows[i][0]} for i in place), {"loss:sum": 1.0})
        for place in places
    ]
    merged = merge_outputs([*parts, None])
    data = [(o["logprobs"], row[1]) for o, row in zip(merged.outputs, rows, strict=True)]
    assert policy_metrics("ppo", config, data) == policy_metrics("ppo", config, rows)


# ---- the update


@pytest.mark.parametrize(
    "hyper",
    [
        AdamParams(0.02),
        AdamParams(0.01, beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.3),
        AdamParams(0.01, eps=0.0),
        AdamParams(0.01, grad_clip_norm=0.5, weight_decay=0.1),
    ],
)
def test_the_update_of_a_shard_is_the_embedded_optimizers_bit_by_bit(
    hyper: AdamParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinkercloud.cluster.training import rank_optimizer

    monkeypatch.setattr(rank_optimizer, "_ELEMENTS_AT_ONCE", 6)  # several batches
    torch.manual_seed(0)
    start = {"a": torch.randn(4, 3), "b": torch.randn(5), "never": torch.randn(2)}
    ours = {n: nn.Parameter(t.clone()) for n, t in start.items()}
    theirs = {n: t.clone() for n, t in start.items()}
    sharded = rank_optimizer._ShardedAdam(list(ours.values()))
    for p in ours.values():
        sharded.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    embedded = AdamW(theirs)
    for step in range(1, 4):
        gradients = {n: torch.randn_like(t) for n, t in start.items()}
        gradients["never"] = torch.zeros(2)
        norm = embedded.step({n: gradients[n] for n in "ab"}, hyper)["unclipped_grad_l2:mean"]
        limit = hyper.grad_clip_norm
        sharded.scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        sharded.hyper, sharded.num_steps = hyper, step
        for n, p in ours.items():
            p.grad = gradients[n]
        sharded.step()
    assert all(torch.equal(p, theirs[n]) for n, p in ours.items())


# ---- sites of Transformer Engine's kinds


class _Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def site(module: Any, kind: str, blocks: Any, order: Any = None) -> Any:
    from tinkercloud.cluster.lora.sites import Projection, Site

    named = tuple(tuple(Projection(*own) for own in block) for block in blocks)
    grouped = hasattr(module, "weight0")
    group: Any = _Alone()
    return Site(module, "x", kind, named, order, group, grouped, grouped, False)  # type: ignore[arg-type]


def pair(rows: int, columns: int, rank: int = 2, scale: float = 3.0) -> Any:
    return torch.randn(rank, columns), torch.randn(rows, rank), scale


def plain(x: torch.Tensor, adapter: Any) -> torch.Tensor:
    a, b, scale = adapter
    return x @ a.T @ b.T * scale


def test_a_grouped_linear_gives_each_experts_rows_that_experts_adapter() -> None:
    from tinkercloud.cluster.lora.layers import site_delta, weight_delta

    module = SimpleNamespace(weight0=None)
    own = site(module, "row", [[("e0", 5, 4)], [("e1", 5, 4)], [("e2", 5, 4)]])
    pairs = {"e0": pair(5, 4), "e2": pair(5, 4, rank=3)}
    x, counts = torch.randn(6, 4), [1, 3, 2]
    delta = site_delta(own, pairs, (x, counts))
    expected = torch.cat((plain(x[:1], pairs["e0"]), torch.zeros(3, 5), plain(x[4:], pairs["e2"])))
    torch.testing.assert_close(delta, expected)
    torch.testing.assert_close(site_delta(own, pairs, (x, torch.tensor(counts))), expected)
    assert own.weight_name(2) == "x.weight2"
    torch.testing.assert_close(x[4:] @ weight_delta(own, 2, pairs).T, expected[4:])
    assert weight_delta(own, 1, pairs) is None


@pytest.mark.parametrize("zero_centered", [False, True])
def test_an_adapter_reads_the_output_of_a_norm_that_is_fused_into_its_linear(
    zero_centered: bool,
) -> None:
    from tinkercloud.cluster.lora.layers import site_delta

    config = SimpleNamespace(layernorm_zero_centered_gamma=zero_centered, layernorm_epsilon=1e-5)
    module = SimpleNamespace(layer_norm_weight=torch.randn(4), config=config)
    own = site(module, "column", [[("q", 3, 4)]])
    pairs, x = {"q": pair(3, 4)}, torch.randn(5, 1, 4)
    scale = module.layer_norm_weight + (1 if zero_centered else 0)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    torch.testing.assert_close(site_delta(own, pairs, (x,)), plain(normed, pairs["q"]))


def test_fused_rows_follow_the_groups_of_heads() -> None:
    from tinkercloud.cluster.lora.layers import weight_delta
    from tinkercloud.cluster.lora.sites import fused_qkv_order

    order = fused_qkv_order(num_heads=4, num_groups=2, size=1)
    assert order.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]  # q0 q1 k0 v0 | q2 q3 k1 v1
    own = site(SimpleNamespace(), "column", [[("q", 4, 3), ("k", 2, 3), ("v", 2, 3)]], order)
    pairs = {"k": pair(2, 3)}
    a, b, scale = pairs["k"]
    delta = weight_delta(own, 0, pairs)
    torch.testing.assert_close(delta[[2, 6]], b @ a * scale)
    assert (delta[[0, 1, 3, 4, 5, 7]] == 0).all()


def test_a_bfloat16_input_is_adapted_in_float32() -> None:
    from tinkercloud.cluster.lora.layers import site_delta

    own = site(SimpleNamespace(), "row", [[("o", 3, 64)]])
    pairs, x = {"o": pair(3, 64)}, torch.randn(5, 64).bfloat16()
    delta = site_delta(own, pairs, (x,))
    assert delta.dtype == torch.bfloat16
    assert torch.equal(
        delta, (F.linear(F.linear(x.float(), pairs["o"][0]), pairs["o"][1]) * 3).bfloat16()
    )
