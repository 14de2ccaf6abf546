"""Fixtures that every folder of tests may use."""

import ast
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import serving
from tinkercloud.config import default_data_dir
from tinkercloud.fetch import locate, packaged
from tinkercloud.storage.keys import DEFAULT_USER

# Before any test module imports the SDK or transformers, which read these once.
os.environ.update(serving.QUIET)


def _parse_without_collecting(*arguments: Any, **keywords: Any) -> ast.AST:
    """pytest parses each module that is imported, amid tests too. CPython 3.11 fails there ("AST
    constructor recursion depth mismatch") where a garbage collection runs a finalizer that waits
    for another thread, as those of the SDK's clients do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return PARSE(*arguments, **keywords)
    finally:
        if was_enabled:
            gc.enable()


PARSE, ast.parse = ast.parse, _parse_without_collecting


def pytest_collection_finish() -> None:
    """References are computed in this process; see `math_kernels` for what may go wrong."""
    if "torch" in sys.modules:
        from tinkercloud.decoding.math_kernels import resolve_math_kernels

        resolve_math_kernels()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The weights of SmolLM2-135M-Instruct, as `make install` puts them."""
    smollm2 = packaged("smollm2")
    found = locate(smollm2, default_data_dir()) or locate(smollm2, serving.ROOT / ".tinkercloud")
    if found is None:
        pytest.fail("the SmolLM2 weights are not here; run `make install`", pytrace=False)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, as a Hugging Face folder."""
    from tests.embedded.tiny import write_tiny_model  # torch only where it is needed

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    """Of the weights: each test that asks for it runs in both."""
    import torch

    return getattr(torch, request.param)


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    """One server on the fake backend for a module; a test that stops it starts its own instead.
    Its first user keeps the numbers of the whole server in view when a test adds others."""
    data_dir = tmp_path_factory.mktemp("server") / "data"
    flags = ("--backend", "fake", "--metrics-users", DEFAULT_USER)
    with serving.start_server(*flags, data_dir=data_dir) as server:
        yield server


@pytest.fixture
def sdk_server(fake_server: serving.Server, monkeypatch: pytest.MonkeyPatch) -> serving.Server:
    """`fake_server`, with the environment by which the SDK finds it."""
    for name, value in fake_server.sdk_environment.items():
        monkeypatch.setenv(name, value)
    return fake_server
