"""The fake backend keeps the contract of every backend."""

import asyncio
import importlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tinkercloud.backends.fake import TINY, FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromBase,
    FromCheckpoint,
    FromModel,
    LoraSpec,
    SampleRequest,
    SamplingParams,
    TokenChunk,
    TrainBatch,
)
from tinkercloud.errors import EngineDied, ModelStateLost, UserError, VersionLost
from tinkercloud.losses import LOSSES

LORA = LoraSpec(rank=4, seed=1)
TOKENS = np.array([1, 2, 3, 20, 5], dtype=np.int32)


def datum(loss_fn: str, seed: int = 0) -> Datum:
    dice = np.random.default_rng(seed)
    inputs = {"target_tokens": dice.integers(0, TINY.vocab_size, len(TOKENS))}
    for name in LOSSES[loss_fn].inputs:
        inputs[name] = dice.normal(size=len(TOKENS)).astype(np.float32)
    if "logprobs" in inputs:
        inputs["logprobs"] = inputs["logprobs"] * 0.1 - 7
    if "sequence_ratio_mask" in inputs:
        inputs["sequence_ratio_mask"] = np.array([0, 1, 1, 1, 0], dtype=np.float32)
    return Datum(TOKENS, inputs)


def batch(loss_fn: str = "cross_entropy", *seeds: int, forward_only: bool = False) -> TrainBatch:
    data = tuple(datum(loss_fn, seed) for seed in seeds or (0,))
    return TrainBatch(data, loss_fn, LOSSES[loss_fn].defaults, forward_only)


async def started(tmp_path: Path) -> FakeBackend:
    backend = FakeBackend(Config(data_dir=tmp_path))
    assert (await backend.start())[0] == TINY
    await backend.create_model("m", TINY.name, LORA)
    return backend


async def loss(backend: FakeBackend, loss_fn: str = "cross_entropy") -> float:
    output = await backend.forward_backward("m", batch(loss_fn, forward_only=True))
    return output.metrics["loss:sum"]


# gspo and cispo hold parts of their formula constant, so that their gradient is not the slope
@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"gspo", "cispo"}))
async def test_a_small_step_lowers_the_loss_by_the_gradient(tmp_path: Path, loss_fn: str) -> None:
    backend = await started(tmp_path)
    before = await loss(backend, loss_fn)
    await backend.forward_backward("m", batch(loss_fn))
    model = backend._models["m"]
    assert model.gradient is not None
    size = 1e-6
    step = size * model.gradient
    backend._models["m"] = type(model)(
        model.base_model, model.lora, model.table - step, model.first, model.second
    )
    change = await loss(backend, loss_fn) - before
    expected = -size * float((model.gradient**2).sum())
    assert expected < 0
    assert change == pytest.approx(expected, rel=1e-3)


# cispo's own weights move with the policy, so its sum need not fall
@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"cispo"}))
async def test_training_lowers_every_loss(tmp_path: Path, loss_fn: str) -> None:
    backend = await started(tmp_path)
    before = await loss(backend, loss_fn)
    for _ in range(5):
        await backend.forward_backward("m", batch(loss_fn))
        await backend.optim_step("m", AdamParams(learning_rate=1e-3))
    assert await loss(backend, loss_fn) < before


async def test_losses_agree_with_the_torch_definitions(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    for name, spec in LOSSES.items():
        module, _, function = spec.target.partition(":")
        define = getattr(importlib.import_module(module), function)
        [item] = batch(name).data
        output = await backend.forward_backward("m", batch(name, forward_only=True))
        logprobs = torch.tensor(output.outputs[0]["logprobs"], dtype=torch.float64)
        inputs = {key: torch.tensor(value) for key, value in item.inputs.items()}
        total = define(logprobs, inputs, spec.defaults).sum().item()
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4), name


async def test_gradients_accumulate_over_calls(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    await backend.create_model("n", TINY.name, LORA)
    await backend.forward_backward("m", batch("cross_entropy", 1, 2))
    for seed in (1, 2):
        await backend.forward_backward("n", batch("cross_entropy", seed))
    norms = [await backend.optim_step(name, AdamParams()) for name in "mn"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


async def test_a_step_is_torchs_adamw(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    table = torch.zeros(backend._models["m"].table.shape, dtype=torch.float64, requires_grad=True)
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([table], **settings)
    params = AdamParams(0.01, 0.8, 0.9, 1e-6, 0.1, grad_clip_norm=0.5)
    for seed in range(3):
        await backend.forward_backward("m", batch("cross_entropy", seed))
        gradient = backend._models["m"].gradient
        assert gradient is not None
        table.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([table], 0.5)
        optimizer.step()
        await backend.optim_step("m", params)
    np.testing.assert_allclose(backend._models["m"].table, table.detach().numpy(), rtol=1e-9)


async def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    item = datum("cross_entropy")
    huge = Datum(item.tokens, {**item.inputs, "weights": np.full(len(TOKENS), np.inf)})
    before = await loss(backend)
    with np.errstate(invalid="ignore"):
        await backend.forward_backward("m", TrainBatch((huge,), "cross_entropy"))
    with pytest.raises(UserError, match="not finite"):
        await backend.optim_step("m", AdamParams())
    assert await loss(backend) == before
    assert (await backend.optim_step("m", AdamParams()))["unclipped_grad_l2:mean"] == 0


async def test_a_model_goes_through_a_file(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    await backend.forward_backward("m", batch())
    await backend.optim_step("m", AdamParams(learning_rate=0.1))
    await backend.save_model("m", tmp_path, with_optimizer=True)
    assert await backend.load_model("n", TINY.name, tmp_path, with_optimizer=True) == LORA
    for name in "mn":
        await backend.forward_backward(name, batch())
        await backend.optim_step(name, AdamParams(learning_rate=0.1))
    assert np.array_equal(backend._models["m"].table, backend._models["n"].table)


async def test_versions_are_immutable(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    request = SampleRequest(TOKENS, 2, SamplingParams(6, seed=3), prompt_logprobs=True)
    await backend.save_model("m", tmp_path, with_optimizer=False)
    versions = [
        await backend.publish(source)
        for source in (FromBase(TINY.name), FromModel("m"), FromCheckpoint(TINY.name, tmp_path))
    ]
    before = [(await backend.sample(version, request)) for version in versions]
    await backend.forward_backward("m", batch())
    await backend.optim_step("m", AdamParams(learning_rate=1.0))
    after = [(await backend.sample(version, request)) for version in versions]
    assert len({output.prompt_logprobs.tobytes() for output in before + after}) == 1
    assert len({output.sequences[1].tokens.tobytes() for output in before + after}) == 1
    newer = await backend.sample(await backend.publish(FromModel("m")), request)
    assert newer.prompt_logprobs.tobytes() != before[0].prompt_logprobs.tobytes()


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.7}])
async def test_reported_logprobs_are_those_of_the_law_sampled_from(
    tmp_path: Path, params: dict
) -> None:
    backend = await started(tmp_path)
    version = await backend.publish(FromBase(TINY.name))
    request = SampleRequest(TOKENS, 1000, SamplingParams(1, seed=5, use_eos=False, **params))
    drawn = (await backend.sample(version, request)).sequences
    tokens = np.array([sequence.tokens[0] for sequence in drawn])
    reported = {int(s.tokens[0]): float(s.logprobs[0]) for s in drawn}
    token, count = max(((t, int((tokens == t).sum())) for t in reported), key=lambda p: p[1])
    expected = np.exp(reported[token])
    assert count / 1000 == pytest.approx(expected, abs=4 * np.sqrt(expected / 1000))
    assert sum(np.exp(value) for value in reported.values()) < 1 + 1e-5


async def test_what_is_not_held_is_said_to_be_lost(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    with pytest.raises(ModelStateLost):
        await backend.optim_step("x", AdamParams())
    version = await backend.publish(FromBase(TINY.name))
    await backend.release(version)
    with pytest.raises(VersionLost):
        await backend.sample(version, SampleRequest(TOKENS, 1, SamplingParams(1, seed=0)))
    await backend.stop()
    with pytest.raises(EngineDied):
        await backend.optim_step("m", AdamParams())


@pytest.mark.parametrize("num_samples", [2, 40], ids=["inline", "in a thread"])
async def test_the_chunks_of_a_sample_are_that_sample(tmp_path: Path, num_samples: int) -> None:
    backend = FakeBackend(Config(data_dir=tmp_path))
    version = await backend.publish(FromBase(TINY.name))
    params = SamplingParams(max_tokens=20, seed=3, stop_token_ids=tuple(range(100)))
    request = SampleRequest(TOKENS, num_samples, params, topk_sample_logprobs=2)
    chunks: list[TokenChunk] = []
    output = await backend.sample(version, request, chunks.append)
    assert {s.stop_reason for s in output.sequences} == {"stop", "length"} or num_samples == 2
    for index, sequence in enumerate(output.sequences):
        own = [chunk for chunk in chunks if chunk.sample_index == index]
        assert [int(token) for c in own for token in c.tokens] == sequence.tokens.tolist()
        assert np.array_equal(np.concatenate([c.logprobs for c in own]), sequence.logprobs)
        ids = np.concatenate([c.topk.token_ids for c in own if c.topk is not None])
        assert sequence.topk is not None
        assert np.array_equal(ids, sequence.topk.token_ids)
        reasons = [c.stop_reason for c in own]
        assert reasons == [None] * (len(own) - 1) + [sequence.stop_reason]
    assert chunks[1].sample_index == 1, "samples take turns, as an engine's do"


async def test_a_cancelled_sample_ends_its_thread(tmp_path: Path) -> None:
    backend = FakeBackend(Config(data_dir=tmp_path))
    version = await backend.publish(FromBase(TINY.name))
    params = SamplingParams(max_tokens=2000, seed=3, use_eos=False)
    chunks: list[TokenChunk] = []
    begun = asyncio.Event()

    def take(chunk: TokenChunk) -> None:
        chunks.append(chunk)
        begun.set()

    call = asyncio.create_task(backend.sample(version, SampleRequest(TOKENS, 500, params), take))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.05)
    num_chunks = len(chunks)
    await asyncio.sleep(0.1)
    assert len(chunks) == num_chunks < 500 * 2000
    names = [thread.name for thread in threading.enumerate()]
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1, names
