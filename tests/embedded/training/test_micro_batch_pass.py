"""The trainer's written-out passes against autograd on the architectures' own code."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.architectures.networks import FAMILIES, SIZES, random_network
from tests.embedded.exactness import assert_same_gradients_in_company
from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.llama import Llama
from tinkercloud.core.types import Datum, LoraSpec, TrainBatch
from tinkercloud.embedded.forward.row_invariance import is_row_invariant, pad_rows
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.training import head as train_head
from tinkercloud.embedded.training import micro_batch_pass, trainable_model
from tinkercloud.embedded.training.attention import (
    CompiledAttentionGradient,
    PackedAttention,
    bucket,
)
from tinkercloud.embedded.training.block import neighbours
from tinkercloud.embedded.training.context import causal_attention
from tinkercloud.embedded.training.layout import lay_out
from tinkercloud.embedded.training.linear import join_weights, joined
from tinkercloud.embedded.training.micro_batch_pass import Share, run_pass
from tinkercloud.embedded.training.reference import run_reference
from tinkercloud.embedded.training.trainable_model import TrainableModel, full_parameters
from tinkercloud.losses import LOSSES
from tinkercloud.weights.adapters import fresh_adapter

VOCAB = SIZES["vocab_size"]
LENGTHS = (7, 7, 1, 30, 65, 12)


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(request.param, tmp_path_factory.mktemp(request.param))


def test_gradients_equal_autograd_where_a_part_of_each_head_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("Llama", "Ernie4_5"):
        plain = open_base(family, tmp_path)
        config = replace(plain.config, rotary_dim=6)
        base = replace(plain, config=config, architecture=Llama(config, "cpu"))
        assert_equal_to_reference(lora(base), batch())
        with monkeypatch.context() as patched:
            without_compiled_pass(patched)
            assert_equal_to_reference(full(base), batch())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base("Llama", tmp_path_factory.mktemp("llama"))


def open_base(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    torch.manual_seed(0)
    random_network(family, tie_word_embeddings=family == "Qwen2").save_pretrained(folder)
    return BaseModel.load("net", folder, None, dtype, torch.device("cpu"))


def lora(base: BaseModel, seed: int = 1, **flags: bool) -> TrainableModel:
    """B is not zero, so that A has a gradient."""
    spec = LoraSpec(rank=4, seed=seed, **flags)
    adapter = fresh_adapter(spec, base.config.linear_shapes(), base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.values():
        b.normal_(0, 0.02, generator=generator)
    return TrainableModel("m", base, spec, adapter, None)


def full(base: BaseModel) -> TrainableModel:
    return TrainableModel("m", base, LoraSpec(rank=0, seed=0), None, full_parameters(base))


def datum(length: int, seed: int, loss: str, targets: int = 0) -> Datum:
    """Prompt positions have weight and advantage 0. targets 0: target_tokens are (N,)."""
    rng = np.random.default_rng(seed)
    shape = (length, targets) if targets else (length,)
    inputs = {"target_tokens": rng.integers(0, VOCAB, shape)}
    for name in LOSSES[loss].inputs:
        values = rng.normal(size=shape).astype(np.float32)
        if name == "logprobs":
            values = -4 + 0.1 * values
        elif name == "sequence_ratio_mask":
            values = np.ones(shape, np.float32)
        if name != "logprobs":
            values[: length // 3] = 0
        inputs[name] = values
    return Datum(rng.integers(0, VOCAB, length).astype(np.int32), inputs)


def batch(loss: str = "cross_entropy", lengths: Sequence[int] = LENGTHS, **more: int) -> TrainBatch:
    data = tuple(datum(n, i, loss, **more) for i, n in enumerate(lengths))
    return TrainBatch(data, loss, LOSSES[loss].defaults)


def beginning_alike(loss: str = "cross_entropy", **more: int) -> TrainBatch:
    """Samples of two prompts, one a prefix of another; two turns; a prefix too short to share."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 400).astype(np.int32)
    parts = [
        *((0, 20, 100, 9), (0, 20, 110, 30), (30, 70, 120, 5), (0, 20, 130, 1)),
        *((30, 70, 120, 3), (30, 70, 120, 40), (0, 5, 200, 12), (0, 20, 0, 0)),
    ]
    data = []
    for i, (start, end, after, count) in enumerate(parts):
        datum_tokens = np.concatenate([tokens[start:end], tokens[after : after + count]])
        data.append(replace(datum(len(datum_tokens), i, loss, **more), tokens=datum_tokens))
    return TrainBatch(tuple(data), loss, LOSSES[loss].defaults)


def share(model: TrainableModel, work: TrainBatch) -> Share:
    return Share(model.weights(), work, range(len(work.data)))


def ran(run, base: BaseModel, *shares: Share, recompute: bool = False) -> Share:
    for _ in run(base, shares, recompute=recompute):
        pass
    return shares[0]


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_equal_to_reference(model: TrainableModel, work: TrainBatch, **how: bool) -> None:
    fast = ran(run_pass, model.base, share(model, work), **how)
    slow = ran(run_reference, model.base, share(model, work))
    assert fast.error is None
    assert fast.loss == pytest.approx(slow.loss, rel=1e-5, abs=1e-4)
    for ours, theirs in zip(fast.outputs, slow.outputs, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name], rtol=1e-5, atol=2e-5)
    assert fast.model.grads.keys() == slow.model.grads.keys()
    for name, grad in fast.model.grads.items():
        other = slow.model.grads[name]
        largest = float(other.abs().max())
        assert largest > 0, name
        torch.testing.assert_close(grad, other, rtol=0, atol=2e-5 * largest, msg=name)


def without_compiled_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (micro_batch_pass, trainable_model):
        monkeypatch.setattr(module, "has_compiled_pass", lambda *_: False)


def test_lora_gradients_of_every_family_equal_autograd(base: BaseModel) -> None:
    assert base.is_llama_family
    assert_equal_to_reference(lora(base), batch())


def test_full_gradients_of_every_family_equal_autograd(base: BaseModel) -> None:
    assert_equal_to_reference(full(base), batch())


def test_gradients_equal_autograd_without_the_compiled_parts_too(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, or without a C compiler."""
    without_compiled_pass(monkeypatch)
    assert_equal_to_reference(lora(base), batch())
    assert_equal_to_reference(full(base), batch())


def test_recomputed_blocks_equal_autograd(base: BaseModel) -> None:
    assert_equal_to_reference(lora(base), batch(), recompute=True)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_equals_autograd(loss: str, llama: BaseModel) -> None:
    assert_equal_to_reference(lora(llama), batch(loss))


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_datums_with_a_common_prefix_equal_autograd(loss: str, llama: BaseModel) -> None:
    assert_equal_to_reference(lora(llama), beginning_alike(loss))


def test_shared_prefixes_equal_autograd_in_every_family(base: BaseModel) -> None:
    assert_equal_to_reference(lora(base), beginning_alike(targets=2), recompute=True)
    assert_equal_to_reference(full(base), beginning_alike())


def test_a_common_prefix_is_computed_once() -> None:
    data = beginning_alike().data
    layout = lay_out([data])
    # Whole blocks of 16 alone are shared: 1 of 20 tokens alike, 2 of 40, none of 5.
    assert layout.ends == (29 + (50 - 16) + 45 + 5 + (43 - 32) + (80 - 32) + 17 + 4,)
    assert len(layout.tokens) == pad_rows(layout.ends[0])
    for each, rows in zip(data, layout.rows[0], strict=True):
        np.testing.assert_array_equal(layout.tokens[rows], each.tokens)
        np.testing.assert_array_equal(layout.positions[rows], np.arange(len(rows)))
    assert set(np.concatenate(layout.sequences())) == set(range(len(layout.tokens)))


def test_models_share_no_rows() -> None:
    data = beginning_alike().data
    (alone,), (first, second) = lay_out([data]).ends, lay_out([data, data]).ends
    assert (first, second) == (alone, 2 * alone)


def test_several_targets_equal_autograd(llama: BaseModel) -> None:
    assert_equal_to_reference(lora(llama), batch(targets=3))


def test_a_target_given_twice_counts_twice(llama: BaseModel) -> None:
    work = batch(targets=2)
    for each in work.data:
        each.inputs["target_tokens"][:, 1] = each.inputs["target_tokens"][:, 0]
    assert_equal_to_reference(lora(llama), work)


def test_chunks_smaller_than_a_datum_equal_autograd(
    llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_head, "LOGIT_ROWS", 16)
    for loss in ("cross_entropy", "gspo"):
        assert_equal_to_reference(lora(llama), batch(loss))


def test_a_kl_term_trains_sampled_tokens_without_an_advantage(llama: BaseModel) -> None:
    plain = batch("stable_reinforce")
    for each in plain.data:
        each.inputs["advantages"][: len(each.tokens) // 2] = 0
        each.inputs["sampled_mask"][:] = np.arange(len(each.tokens)) >= len(each.tokens) // 3
    work = replace(plain, loss_fn_config={**plain.loss_fn_config, "kl_coeff": 0.2})
    assert_equal_to_reference(lora(llama), work)
    norms = [
        sum(float(grad.square().sum()) for grad in done.model.grads.values())
        for done in (ran(run_pass, llama, share(lora(llama), each)) for each in (plain, work))
    ]
    assert norms[0] != norms[1]


@pytest.mark.parametrize(
    "flags",
    [
        {"train_unembed": False},
        {"train_attn": False},
        {"train_mlp": False},
        {"train_attn": False, "train_mlp": False},
    ],
    ids=str,
)
def test_adapters_of_some_modules_equal_autograd(flags: dict[str, bool], llama: BaseModel) -> None:
    assert_equal_to_reference(lora(llama, **flags), batch())


def test_a_batch_without_any_weight_has_a_zero_gradient(llama: BaseModel) -> None:
    work = batch()
    for each in work.data:
        each.inputs["weights"][:] = 0
    done = ran(run_pass, llama, share(lora(llama), work))
    assert done.loss == 0
    assert all(grad.abs().max() == 0 for grad in done.model.grads.values())


def test_forward_only_scores_as_training_does_and_adds_nothing(llama: BaseModel) -> None:
    for loss in ("cross_entropy", "gspo"):
        work = batch(loss)
        trained = ran(run_pass, llama, share(lora(llama), work))
        scored = ran(run_pass, llama, share(lora(llama), replace(work, forward_only=True)))
        assert scored.model.grads == {}
        assert scored.loss == trained.loss
        for a, b in zip(scored.outputs, trained.outputs, strict=True):
            np.testing.assert_array_equal(a["logprobs"], b["logprobs"])


def test_bfloat16_gradients_are_as_near_to_float32_as_those_of_autograd(tmp_path: Path) -> None:
    exact, narrow = open_base("Qwen3", tmp_path), open_base("Qwen3", tmp_path, torch.bfloat16)
    truth = ran(run_pass, exact, share(lora(exact), batch())).model.grads

    def distance(run) -> float:
        gradients = ran(run, narrow, share(lora(narrow), batch())).model.grads
        apart = [float((gradients[n] - truth[n]).norm() / truth[n].norm()) for n in truth]
        return float(np.mean(apart))

    assert distance(run_pass) < 1.2 * distance(run_reference) + 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_values_are_rounded_where_the_plain_pass_rounds_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through PyTorch; elsewhere the log-probabilities would be as far apart as both are from
    float32. The adapter is a fresh one: its products round once more here."""
    without_compiled_pass(monkeypatch)
    narrow = open_base(family, tmp_path, torch.bfloat16)
    rounded = {name: weight.float() for name, weight in narrow.weights.items()}
    exact = replace(narrow, weights=rounded, dtype=torch.float32)

    def scored(run: Callable[..., object], base: BaseModel) -> np.ndarray:
        model = lora(base)
        assert model.adapter is not None
        for _, b in model.adapter.values():
            b.detach().zero_()
        outputs = ran(run, base, share(model, batch())).outputs
        return np.concatenate([output["logprobs"] for output in outputs])

    plain, truth = scored(run_reference, narrow), scored(run_reference, exact)
    distance = np.abs(scored(run_pass, narrow) - plain).mean()
    assert distance < 0.3 * np.abs(plain - truth).mean(), distance


def test_the_same_pass_gives_the_same_bits(base: BaseModel) -> None:
    first, second = (ran(run_pass, base, share(lora(base), batch())) for _ in range(2))
    assert first.loss == second.loss
    assert_same_bits(first.model.grads, second.model.grads)


def test_joined_weights_keep_their_values_and_give_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiled_pass(monkeypatch)
    plain = open_base("Qwen2", tmp_path)
    joint = dict(plain.weights)
    join_weights(joint, neighbours(plain.config.num_layers))
    together = replace(plain, weights=joint)
    for name, tensor in plain.weights.items():
        assert torch.equal(tensor, together.weights[name])
    for group in neighbours(together.config.num_layers):
        assert joined([together.weights[name] for name in group]) is not None
        assert joined([plain.weights[name] for name in group]) is None
    shares = [ran(run_pass, b, share(lora(b), batch())) for b in (plain, together)]
    for name, grad in shares[0].model.grads.items():
        other = shares[1].model.grads[name]
        torch.testing.assert_close(grad, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def assert_attention_equals(
    expected: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    sequences: Sequence[np.ndarray],
) -> None:
    """Result and gradients of these sequences' rows, as autograd has them of `expected`."""
    torch.manual_seed(0)
    num_rows = 1 + max(int(rows.max()) for rows in sequences)
    q, k, v = (torch.randn(num_rows, heads, 16, requires_grad=True) for heads in (6, 2, 2))
    dout, right = torch.randn_like(q), expected(q, k, v)
    expected = torch.autograd.grad(right, (q, k, v), dout)
    attention = PackedAttention(sequences, num_rows, torch.device("cpu"))
    with torch.no_grad():
        out, kept = attention.forward(q, k, v, Scoring(16**-0.5), keep=True)
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        attention.backward(kept, dout, gradients)
    torch.testing.assert_close(out, right.detach())
    found = [gradients]
    if library() is not None:
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        inputs = (q.detach(), k.detach(), v.detach(), dout)
        compiled = CompiledAttentionGradient(sequences, num_rows)
        compiled.write(inputs, Scoring(16**-0.5), (dq, dk, dv))
        found.append([dq, dk, dv])
    for ours in found:
        for one, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sequences",
    [
        ((0, 40, 0, 0), (0, 40, 60, 70), (0, 20, 40, 60)),
        ((0, 30, 50, 70), (0, 30, 30, 50)),
    ],
)
def test_attention_of_shared_rows_sums_their_gradients(
    sequences: Sequence[tuple[int, int, int, int]],
) -> None:
    rows = [np.r_[a:b, c:d] for a, b, c, d in sequences]

    def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros_like(q)
        for sequence in reversed(rows):
            at = torch.from_numpy(sequence)
            whole = whole.index_put((at,), causal_attention(q[at], k[at], v[at], [len(sequence)]))
        return whole

    assert_attention_equals(one_by_one, rows)


@pytest.mark.parametrize("lengths", [(8, 8, 8), (5, 6, 40, 6, 1), (70,), (16, 9, 16)])
def test_attention_by_buckets_equals_attention_one_by_one(lengths: tuple[int, ...]) -> None:
    rows = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    assert_attention_equals(lambda q, k, v: causal_attention(q, k, v, lengths), rows)


def test_a_bucket_wastes_little() -> None:
    assert all(n <= bucket(n) <= max(n + 7, 1.25 * n) for n in range(1, 3000))


@pytest.mark.parametrize("loss", ["cross_entropy", "gspo"])
def test_models_that_share_a_pass_have_the_results_of_separate_ones(
    base: BaseModel, loss: str
) -> None:
    models = [lora(base, seed) for seed in (1, 2, 3, 4)]
    works = [batch(loss, lengths) for lengths in ((9, 30), (64,), (5, 5, 17, 300))]
    works.append(beginning_alike(loss))
    alone = [ran(run_pass, base, share(m, w)) for m, w in zip(models, works, strict=True)]
    together = [share(m, w) for m, w in zip(models, works, strict=True)]
    ran(run_pass, base, *together)
    for separate, shared in zip(alone, together, strict=True):
        exact = is_row_invariant(torch.float32)
        assert shared.loss == pytest.approx(separate.loss, rel=0 if exact else 1e-5, abs=0)
        assert_same_gradients_in_company(separate.model.grads, shared.model.grads)


def test_an_error_of_one_share_leaves_the_others_as_they_are(llama: BaseModel) -> None:
    models = [lora(llama, seed) for seed in (1, 2)]
    good, bad = batch("importance_sampling", (9, 20)), batch("importance_sampling", (5, 8))
    bad.data[1].inputs["logprobs"][:] = -2000.0
    bad.data[1].inputs["advantages"][:] = 1.0
    alone = ran(run_pass, llama, share(models[0], good))
    shares = share(models[1], bad), share(models[0], good)
    ran(run_pass, llama, *shares)
    assert "importance_sampling loss of datum 1 is -inf" in str(shares[0].error)
    assert shares[1].error is None
    assert_same_gradients_in_company(alone.model.grads, shares[1].model.grads)
