"""Both clients: the official SDK and ours."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests import serving
from tests.api.sdk.scene import Scene, end


@pytest.fixture(params=["tinker", "tinker_gmi"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(importlib.import_module(request.param))


@pytest.fixture
def service(scene: Scene, sdk_server: serving.Server) -> Iterator[Any]:
    client = scene.connect()
    yield client
    end(client)
