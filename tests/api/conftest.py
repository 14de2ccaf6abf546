"""A running server for each test."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.harness import Api, serving


@pytest.fixture(autouse=True)
def new_sdk_clients() -> None:
    """The SDK keeps one client without a session for each key of a process, also where the key is
    None and the server of the environment has changed."""
    sdk = sys.modules.get("tinker.lib.internal_client_holder")
    if sdk is not None:
        sdk.sessionless_holder_cache._holders.clear()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(tmp_path / "data", gap_grace_s=0.3) as api:
        yield api
