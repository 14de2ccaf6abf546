"""A backend of tiny pools, and where its ranks read what is to go wrong."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.pool.tiny_pools import tiny_config
from tinkercloud.cluster.backend import ClusterBackend


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    return folder


@pytest.fixture
async def backend(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    faults: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[ClusterBackend]:
    """Two bases; two ranks for each pool, and room for one pool. With a Ray of its own where none
    is connected. Its parameter: seconds in which a placement must be there."""
    timeout_s = getattr(request, "param", 240.0)
    made = ClusterBackend(tiny_config(tmp_path, faults, monkeypatch, timeout_s))
    await made.start()
    yield made
    await made.stop()
