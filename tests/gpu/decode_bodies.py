"""What tests of decoding on a GPU do, as functions of the device; tests/embedded runs them too."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.decoding.rows import row_params
from tests.embedded.decode_scene import Scene, random_base, steps, tiny_config, version
from tests.embedded.tiny import ask, random_prompt
from tinkercloud.core.types import SampleOutput
from tinkercloud.decoding import philox
from tinkercloud.decoding.sampler import Scan, gumbel_noise, noise_of, sample
from tinkercloud.embedded.forward.runners import GraphRunner, Runner, TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling import base_states
from tinkercloud.embedded.sampling.engine import SamplingEngine

LENGTHS = (1, 15, 16, 40, 129, 7, 300, 33, 2, 90, 17)
NUM_STEPS = 20  # so that some tables grow wider


def scene(
    family: str, device: str, dtype: torch.dtype = torch.float32, ranks: Sequence[int] = (4, 11, 8)
) -> Scene:
    """Eleven sequences, the base between adapters; the same numbers on every device."""
    base = random_base(tiny_config(family), dtype, device)
    first, second, third = (version(base, rank, seed) for seed, rank in enumerate(ranks, 1))
    versions = [(first, 3), (version(base, None, 0), 2), (second, 5), (third, 1)]
    return Scene.of(versions, LENGTHS)


def compare(
    one: tuple[Scene, Runner], other: tuple[Scene, Runner], tolerance: float, count: int = NUM_STEPS
) -> None:
    """Logits of every step, and what then lies in the blocks."""
    ours, theirs = steps(*one, count), steps(*other, count)
    pairs = [*zip(ours, theirs, strict=True)]
    held = zip(one[0].held(), other[0].held(), strict=True)
    pairs += [(a.float().cpu(), b.float().cpu()) for a, b in held]
    for a, b in pairs:
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def other_adapters(device: str, runner: GraphRunner) -> int:
    """Replays with adapters that were not there at the capture; the number of captured graphs."""
    ours, theirs = scene("Qwen3", device), scene("Qwen3", device)
    for seed in range(4):
        one = version(ours.base, 8, 10 + seed)
        ours.versions = theirs.versions = [(one, 11)]
        compare((ours, runner), (theirs, TorchRunner()), 1e-4, count=2)
    return sum(len(graphs) for _, graphs in runner._graphs.values())


def draws(device: str, scan: Scan) -> None:
    """Random numbers, tokens and log-probabilities are those of the plain draw on a CPU."""
    keys = [(5, 3, 70), (2**64 - 1, 1023, 2**31)]
    flat = torch.tensor([[philox.signed(part) for part in key] for key in keys], device=device)
    words = philox.random_words(flat, 50_001).cpu()
    assert torch.equal(words, philox.plain_words(flat.cpu(), 50_001))
    for row, key in zip(words, keys, strict=True):
        noise = noise_of(row.numpy().astype(np.uint32))
        assert torch.equal(noise, gumbel_noise(*key, 50_001))
    logits = 4 * torch.randn(48, 50_001, generator=torch.Generator().manual_seed(7))
    cuts = [(-1, 1.0), (20, 1.0), (-1, 0.8), (50, 0.9)]
    rows = [
        row_params((0.0, 0.3, 1.0)[i % 3], cuts[i % 4], 2**64 - 1 - i, i % 5, 3 * i)
        for i in range(48)
    ]
    for chosen in (range(48), range(0, 48, 4), range(5, 12), range(0, 40, 4), range(12, 48, 4)):
        own = [rows[i] for i in chosen]
        found = sample(logits[list(chosen)].to(device), own, scan)
        expected = sample(logits[list(chosen)], own)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-5, rtol=0)
        torch.testing.assert_close(
            found.distributions().cpu(), expected.distributions(), atol=1e-4, rtol=1e-6
        )


def sampled(
    folder: Path, device: str, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> list[SampleOutput]:
    """The engine's answers to a mixed load through that runner, in float32."""
    monkeypatch.setattr(base_states, "runner_for", lambda base, num_threads: runner)
    base = BaseModel.load("tiny", folder, folder, torch.float32, torch.device(device))
    engine = SamplingEngine(max_batch=64, kv_cache_bytes=2**24)
    outputs: dict[int, SampleOutput | BaseException] = {}
    versions: list[Version] = [version(base, None, 0), version(base, 4, 1), version(base, 8, 2)]
    for i in range(12):
        request = ask(
            random_prompt(10 + 30 * i, i), n=1 + i % 3, max_tokens=30, seed=i, use_eos=False,
            temperature=(1.0, 0.0, 0.7)[i % 3], top_k=(-1, 20)[i % 2], prompt_logprobs=i == 4,
        )  # fmt: skip
        engine.submit(versions[i % 3], request, lambda o, i=i: outputs.__setitem__(i, o))
    while engine.busy:
        engine.step()
    return [outputs[i] for i in range(12)]


def compare_sampled(ours: list[SampleOutput], theirs: list[SampleOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
    scored = ours[4].prompt_logprobs, theirs[4].prompt_logprobs
    np.testing.assert_allclose(scored[0][1:], scored[1][1:], atol=1e-3)
