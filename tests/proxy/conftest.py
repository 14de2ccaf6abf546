"""Servers of texts, and the proxy before them."""

import json
from pathlib import Path

import pytest

from tests.chat.model_folder import write_model_folder
from tests.proxy.bench import Bench, Made, TextServer
from tests.proxy.scripted_server import ScriptedModel
from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import ServedModel


@pytest.fixture
def bench(tmp_path: Path) -> Made:
    folder = write_model_folder(tmp_path / "model")
    text = TextModel.of(ServedModel("m", "", 0, 0, 0, folder, (), "float32"))

    size = json.loads((folder / "config.json").read_text())["vocab_size"]

    def made(target: str = "vllm", draft: str = "vllm") -> Bench:
        model = ScriptedModel(size)
        leader = ScriptedModel(size, leader=model, agreement=0.9)
        servers = TextServer(target, model), TextServer(draft, leader)
        for server in servers:
            server.text = text
        return Bench(folder, *servers)

    return made
