"""Servers on SmolLM2's real weights, clients of them, and the weights as others read them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from transformers import AutoTokenizer

from tests.e2e.clients import MODEL, Client
from tests.serving import Server, backend_arguments, start_server
from tinkercloud.weights.huggingface import ensure_hf_folder


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked to float32. transformers unpacks the file to the same weights
    (tests/architectures), but takes ten times as long."""
    return ensure_hf_folder(smollm2_gguf, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With its own defaults."""
    data_dir = tmp_path_factory.mktemp("server") / "data"
    with start_server("--model", f"{MODEL}={smollm2_gguf}", data_dir=data_dir) as server:
        yield server


@pytest.fixture(scope="module")
def float32_server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """In float32, on the tested backend."""
    data_dir = tmp_path_factory.mktemp("server") / "data"
    model = ("--model", f"{MODEL}={smollm2_gguf}", "--dtype", "float32")
    with start_server(*model, *backend_arguments(), data_dir=data_dir) as server:
        yield server


@pytest.fixture(scope="module")
def official(server: Server) -> Iterator[Client]:
    """The official SDK."""
    client = Client.connect(tinker, server)
    yield client
    client.close()
