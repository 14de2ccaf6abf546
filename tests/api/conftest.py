"""A running server for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.harness import Api, serving


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(tmp_path / "data", gap_grace_s=0.3) as api:
        yield api
