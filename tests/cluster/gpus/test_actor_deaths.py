"""A node whose memory is full, by Ray's judgement: the processes that it ends, and what is said."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cpu.engines import settings
from tests.cluster.ray_cluster import STORE_BYTES
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.errors import EngineDied


@pytest.fixture(scope="module", autouse=True)
def full_node() -> Iterator[None]:
    import ray

    full = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 100}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config={**full, "min_memory_free_bytes": -1},
        )
    yield
    ray.shutdown()


async def test_an_engine_that_ray_ends_for_want_of_memory_says_so_with_numbers(tmp_path: Path):
    waiting = settings(tmp_path, tmp_path, command=("sleep", "60"), options=(), router=False)
    manager = RolloutManager(waiting, [()])
    with pytest.raises(EngineDied, match=r"ran out of memory \(\S+GB used / \S+GB\).*OutOfMemory"):
        await manager.start()
    assert manager.engine_urls() == ()
