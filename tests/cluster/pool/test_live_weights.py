"""Whole weights on their way from live ranks to live engines: by handle where they share GPUs, by
broadcast where they do not, by disk once the trainer has gone on."""

import shlex
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from tests.cluster.cpu.engines import (
    CPU_OPTIONS,
    sglang_command,
    sglang_environment,
    write_served_model,
)
from tests.cluster.ray_cluster import one_node, wait_until_settled
from tests.embedded.tiny import ask, supervised
from tinkercloud.cluster.backend import ClusterBackend
from tinkercloud.config import ClusterConfig, Config, ModelSource
from tinkercloud.core.types import AdamParams, FromModel, LoraSpec, TrainBatch

DATA = TrainBatch(tuple(supervised(12 + i, i) for i in range(3)), "cross_entropy")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with one_node(cpus=4):
        yield


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param("tensor", id="shared"),
        pytest.param("broadcast", id="apart", marks=pytest.mark.slow),
    ],
)
async def backend(request, tmp_path_factory) -> AsyncIterator[ClusterBackend]:
    root = tmp_path_factory.mktemp("live")
    (root / "model").mkdir()
    environment = [f"{name}={value}" for name, value in sglang_environment().items()]
    is_apart = request.param == "broadcast"
    own = ClusterConfig(
        gpus=3 if is_apart else 2,
        rollout_gpus=1 if is_apart else 0,
        gpu_memory_bytes=16 * 1024**3,
        tp=2,
        rollout_tp=1,
        max_seq_len=256,
        device="cpu",
        prepare="tinkercloud.cluster.cpu.ranks:prepare",
        sglang_command=shlex.join(("env", *environment, *sglang_command())),
        sglang_args=shlex.join((*CPU_OPTIONS, "--max-total-tokens", "2048")),
        start_timeout_s=240.0,
        operation_timeout_s=120.0,
        sample_timeout_s=120.0,
    )
    model = write_served_model(root / "model")
    config = Config(
        data_dir=root / "data", models=(ModelSource("tiny", model),), backend="cluster", cluster=own
    )
    backend = ClusterBackend(config)
    await backend.start()
    backend.way = request.param
    yield backend
    await backend.stop()
    wait_until_settled()


def counts(backend: ClusterBackend) -> dict[str, int]:
    """How often whole weights came to the model's engines, by way."""
    stats = backend.stats()
    return {how: stats[f"m: weights_by_{how}"] for how in ("tensor", "broadcast", "disk")}


async def scores(backend: ClusterBackend, version: str) -> np.ndarray:
    datum = DATA.data[0]
    tokens = [*datum.tokens.tolist(), int(datum.inputs["target_tokens"][-1])]
    request = ask(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=True)
    output = await backend.sample(version, request)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs[1:]


async def trained(backend: ClusterBackend) -> np.ndarray:
    """The trainer's own log-probabilities, after a step that moves them well."""
    await backend.forward_backward("m", DATA)
    await backend.optim_step("m", AdamParams(learning_rate=2e-3))
    batch = replace(DATA, forward_only=True)
    return (await backend.forward_backward("m", batch)).outputs[0]["logprobs"]


async def test_engines_follow_the_trainer_and_go_back_to_older_versions(backend: ClusterBackend):
    way, spec = backend.way, LoraSpec(rank=0, seed=0)
    await backend.create_model("m", "tiny", spec)
    first_scores = await trained(backend)
    first = await backend.publish(FromModel("m"))
    assert counts(backend) == {"tensor": 0, "broadcast": 0, "disk": 0}, "nobody has sampled yet"
    np.testing.assert_allclose(await scores(backend, first), first_scores, atol=1e-4)
    expected = {"tensor": 0, "broadcast": 0, "disk": 0}
    assert counts(backend) == {**expected, way: 1}

    second_scores = await trained(backend)
    assert np.abs(second_scores - first_scores).max() > 1e-2
    second = await backend.publish(FromModel("m"))
    np.testing.assert_allclose(await scores(backend, second), second_scores, atol=1e-4)
    assert counts(backend) == {**expected, way: 2}

    # The trainer has gone on: what was published before is on disk only.
    np.testing.assert_allclose(await scores(backend, first), first_scores, atol=1e-4)
    assert counts(backend) == {**expected, way: 2, "disk": 1}
    np.testing.assert_allclose(await scores(backend, second), second_scores, atol=1e-4)
    assert counts(backend) == {**expected, way: 3, "disk": 1}
    again = (await backend.forward_backward("m", replace(DATA, forward_only=True))).outputs[0]
    np.testing.assert_array_equal(again["logprobs"], second_scores)
