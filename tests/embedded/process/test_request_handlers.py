"""The table from request types to handlers is complete, and what is not in it has a named error."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.process.worker_driver import Driver
from tests.embedded.tiny import open_store
from tinkercloud.embedded.process import protocol
from tinkercloud.embedded.process.protocol import Release, Request
from tinkercloud.embedded.process.request_handlers import DraftHooks, RequestHandlers
from tinkercloud.embedded.process.token_outbox import TokenOutbox
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.errors import (
    EngineDied,
    ModelStateLost,
    TinkercloudError,
    UnknownRequest,
    error_of,
)

REQUEST_TYPES = {
    value
    for value in vars(protocol).values()
    if inspect.isclass(value) and issubclass(value, Request) and value is not Request
}


@pytest.fixture
def handlers(folder: Path) -> RequestHandlers:
    engine = SamplingEngine(max_batch=1, kv_cache_bytes=2**20)
    training, tokens = TrainingQueue(Limits(64)), TokenOutbox(lambda message: None)
    drafts = DraftHooks(lambda base: None, lambda name: None)
    return RequestHandlers(open_store(folder), engine, training, tokens, drafts)


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(folder, tmp_path)
    yield driver
    driver.end()


def test_every_request_type_has_a_handler_and_every_handler_a_request_type(
    handlers: RequestHandlers,
) -> None:
    taken = [
        inspect.signature(method).parameters["request"].annotation
        for name, method in vars(RequestHandlers).items()
        if inspect.isfunction(method) and name not in ("__init__", "handle")
    ]
    assert REQUEST_TYPES
    assert handlers.request_types == REQUEST_TYPES
    assert sorted(map(str, taken)) == sorted(map(str, REQUEST_TYPES))


def test_a_request_without_a_handler_has_a_named_error(driver: Driver) -> None:
    class Reboot(Request[None]):
        __slots__ = ()

    error = driver.result(driver.send(Reboot())).error
    assert error == ("UnknownRequest", str(UnknownRequest("Reboot")))
    driver.call(Release("v-0"))  # the worker still serves


def test_an_error_is_rebuilt_from_its_name_and_text() -> None:
    error = error_of("ModelStateLost", "the weights are gone")
    assert (type(error), str(error)) == (ModelStateLost, "the weights are gone")
    assert type(error_of("KeyError", "'x'")) is TinkercloudError
    assert type(error_of("KeyError", "'x'", EngineDied)) is EngineDied
