"""A pool on fakes of llama.cpp's programs, for a test that starts and stops it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool.pools import Pool, fake_programs, write_pool


@pytest.fixture
def pool(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Pool]:
    """Two workers: either can hold `small`, only both `large`, and nothing holds `huge`."""
    programs = fake_programs(tmp_path)
    common = {"path": str(smollm2_gguf), "ubatch": 64}
    models = [
        common | {"name": "small", "context": 1024},
        common | {"name": "large", "context": 16384},
        common | {"name": "huge", "context": 10**7},
    ]
    lent = {"gpus": [{"device": "CPU", "memory": "360MiB"}], "rpc_server": programs["rpc"]}
    workers = [lent | {"name": "a"}, lent | {"name": "b"}]
    pool = write_pool(tmp_path, models, workers, llama_server=programs["server"], reserve="8MiB")
    yield pool
    if pool.folder.is_running:
        pool.command("stop")
