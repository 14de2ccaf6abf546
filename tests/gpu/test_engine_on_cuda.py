"""SGLang on one GPU, started as the cluster starts it: our law of sampling, and memory given back.

Needs SGLang here, or in the Python that TINKERCLOUD_TEST_SGLANG_PYTHON names.
"""

import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cluster.cpu import engines
from tests.cluster.ray_cluster import one_node
from tests.embedded.tiny import Sampler, ask, open_store, random_prompt
from tests.gpu import bodies
from tinkercloud.cluster.base_models import ENGINE_ENTRY
from tinkercloud.cluster.gpus.placement import Placer, Request, release
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.core.types import FromBase

PYTHON = os.environ.get("TINKERCLOUD_TEST_SGLANG_PYTHON") or (
    sys.executable if importlib.util.find_spec("sglang") else None
)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="there is no SGLang")
PROMPT = random_prompt(23, seed=4)
DTYPE = "bfloat16"  # SGLang's kernels have no float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engines.write_served_model(tmp_path / "model")


@pytest.fixture
async def manager(folder: Path, tmp_path: Path) -> AsyncIterator[RolloutManager]:
    command = (str(PYTHON), "-m", ENGINE_ENTRY)
    options = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "dtype": DTYPE}
    settings = engines.settings(
        folder, tmp_path, command=command, options=(), arguments=engines.arguments(**options)
    )
    with one_node(cpus=2):
        placement = await Placer().take(Request("engine", 1, timeout_s=60.0))
        manager = RolloutManager(settings, [placement.slots([0])])
        await manager.start()
        yield manager
        await manager.stop()
        await release(placement)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


async def test_an_engine_frees_its_memory_and_answers_as_before_once_it_is_resumed(
    manager: RolloutManager,
):
    found = await bodies.rested(manager, ask(PROMPT, n=2, max_tokens=20, seed=3), free_bytes)
    bodies.compare_rested(found)
    assert found.freed_bytes > 0.1 * torch.cuda.mem_get_info()[1]
    assert found.device_freed_bytes >= 0.9 * found.freed_bytes


async def test_scores_are_those_of_the_embedded_engine(manager: RolloutManager, folder: Path):
    request = ask(PROMPT, max_tokens=1, prompt_logprobs=True)
    ours = (await manager.generate(None, request)).prompt_logprobs
    store = open_store(folder)
    theirs = Sampler(store).one(store.publish(FromBase("tiny")), request).prompt_logprobs
    assert ours is not None
    assert theirs is not None
    assert np.abs(ours[1:] - theirs[1:]).mean() < 1e-2
