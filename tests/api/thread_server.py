"""A server in a thread of the test's process, and what the official SDK asks of it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from tinker import types

from tests.waiting import wait_for
from tinkercloud.app import create_app
from tinkercloud.backends.base import Backend
from tinkercloud.config import Config
from tinkercloud.storage.keys import KeyStore

MODEL = "fake/tiny"
PROMPT = types.ModelInput.from_ints([1, 2, 3])
GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
ADAM = types.AdamParams(learning_rate=0.1)


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": weights or [1.0] * (len(tokens) - 1),
        },
    )


DATA = [datum([i, i + 1, i + 2, 5]) for i in range(1, 6)]


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """The base URL of an application that is served in a thread for the length of the block."""
    options = uvicorn.Config(app, port=0, log_level="warning", lifespan="on", ws="none")
    server = uvicorn.Server(options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()

    def has_started() -> bool:
        assert thread.is_alive(), "the server did not start"
        return server.started

    try:
        wait_for("the server has started", has_started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def thread_server(
    data_dir: Path,
    backend: Backend | None = None,
    *,
    hold_s: float = 30.0,
    **client_config: object,
) -> Iterator[tuple[str, str]]:
    """(base URL, key) of a server in this process, which may send flags to its clients."""
    store = KeyStore(data_dir)
    key = store.add("ann")
    store.close()
    config = Config(data_dir=data_dir, backend="fake", hold_s=hold_s)
    with serve(create_app(config, backend, client_config=client_config)) as base_url:
        yield base_url, key
