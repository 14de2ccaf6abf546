"""Log records as JSON, of a real server and in this process."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests import serving
from tests.api.harness import Api
from tests.api.harness import serving as serving_here
from tests.waiting import wait_for
from tinkercloud.logs import JsonFormatter


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    data_dir = tmp_path_factory.mktemp("server") / "data"
    arguments = ("--backend", "fake", "--log-format", "json", "--log-level", "debug")
    with serving.start_server(*arguments, data_dir=data_dir) as server:
        yield server


def test_an_operation_that_ended_names_its_request_model_and_session(
    sdk_server: serving.Server,
) -> None:
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model="fake/tiny", rank=4).result()
    model_id = model.get_info().model_id
    model.optim_step(tinker.AdamParams(learning_rate=0.1)).result()

    def ended() -> list[dict[str, str]]:
        whole = sdk_server.output().rpartition("\n")[0].splitlines()
        entries = [json.loads(line) for line in whole if line.startswith("{")]
        return [e for e in entries if e["message"].startswith("OptimStep completed in ")]

    # A poll that finds the result on record may be answered before the log tells of it.
    (entry,) = wait_for("the log tells of it", ended)
    assert entry["level"] == "debug"
    assert entry["process"] == "server"
    assert entry["user"] == "default"
    assert entry["model_id"] == model_id
    assert entry["session_id"] == model_id.partition(":")[0]
    assert entry["request_id"].startswith("train-")


async def test_a_failure_names_its_user_and_the_stack_is_a_field(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinkercloud.backends.fake import FakeBackend

    async def broken(*args: object) -> dict[str, float]:
        raise RuntimeError('a "quoted"\nreason')

    shown: list[dict[str, object]] = []

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(json.loads(JsonFormatter("server").format(record)))

    monkeypatch.setattr(FakeBackend, "optim_step", broken)
    handler = Shown()
    logging.getLogger("tinkercloud").addHandler(handler)
    try:
        async with serving_here(tmp_path) as api:
            await fails(api, await api.model())
    finally:
        logging.getLogger("tinkercloud").removeHandler(handler)
    (entry,) = [e for e in shown if "stack" in e]
    assert entry["level"] == "error"
    assert (entry["user"], entry["kind"], entry["seq_id"]) == ("ann", "OptimStep", 1)
    assert 'RuntimeError: a "quoted"\nreason' in str(entry["stack"])


async def fails(api: Api, model_id: str) -> None:
    await api.failure(await api.optim_step(model_id, 1), category="server")
