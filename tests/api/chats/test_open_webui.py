"""Requests of Open WebUI to the server's endpoint."""

from pathlib import Path

from tests.api.harness import serving
from tests.chat.model_folder import write_model_folder
from tests.open_webui import replay
from tinkercloud.config import ModelSource


async def test_open_webui_is_answered(tmp_path: Path) -> None:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "data", models=(source,)) as api:
        await replay(api.http, "/oai/api/v1", "chatty")
