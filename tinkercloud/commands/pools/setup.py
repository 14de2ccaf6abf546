"""`tinkercloud pool init`: from flags, or from answers at a terminal, to the YAML."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tinkercloud.addresses import is_loopback, read_key
from tinkercloud.commands.options import Arguments
from tinkercloud.errors import ConfigError
from tinkercloud.pool.pool_file import PoolFile, parse_pool, pool_text
from tinkercloud.pool.searching import FoundWorker, search

FIRST_PORT = 50050
PORTS_EACH = 20


def write_pool(arguments: Arguments, ask: Callable[[str], str] | None = None) -> Iterator[str]:
    """Lines about what was written. ask: answers a question, "" for nothing more; None: at the
    terminal where there is one. Raises ConfigError."""
    path: Path = arguments["file"]
    if path.exists() and not arguments["force"]:
        raise ConfigError(f"{path} is there already; --force overwrites it")
    models: list[str] = arguments["model"] or []
    workers: list[str] = arguments["worker"] or []
    networks: list[str] = arguments["search"] or []
    question = None
    if not models:
        question = ask or _terminal()
        if question is None:
            raise ConfigError("name a model: --model NAME=PATH, and --worker for each machine")
        models = list(_answers(question, "a model, as NAME=PATH of its GGUF file"))
        networks += _answers(question, "a network to look for workers in, as 192.168.1.0/24")
    for network in networks:
        candidates = search(network, arguments["search_port"], _key(arguments))
        yield f"{network}: {len(candidates)} workers"
        for worker in candidates:
            yield from _taken(worker, question, workers)
    if question is not None:
        workers += _answers(question, "a worker: local, [USER@]HOST or HOST:PORT, then ,CUDA0=8GiB")
    pool = made_pool(arguments, models, workers)
    path.write_text(pool_text(pool), encoding="utf-8")
    yield f"wrote {path}: models: {len(pool.models)}, workers: {len(pool.workers)}"
    for worker in pool.workers:
        if worker.start == "by_hand":
            devices = " ".join(f"--device {gpu.device}" for gpu in worker.gpus)
            yield (
                f"on {worker.name}: tinkercloud pool worker --listen {worker.host}:{worker.port} "
                f"{devices}"
            )
    yield f"next: tinkercloud pool doctor --file {path}, then tinkercloud pool start --file {path}"


def _taken(
    worker: FoundWorker, ask: Callable[[str], str] | None, workers: list[str]
) -> Iterator[str]:
    """Adds what was found to `workers`: all of it where nobody is asked."""
    if worker.key_wanted:
        yield f"  {worker.place} wants another key: name its file with --key-file"
        return
    devices = ", ".join(worker.devices)
    if ask is None or ask(f"{worker.place} lends {devices}: take it? y/n").strip() in ("y", "yes"):
        workers.append(worker.spec)
        yield f"  {worker.place} lends {devices}"


def made_pool(arguments: Arguments, models: list[str], workers: list[str]) -> PoolFile:
    """Raises ConfigError."""
    coordinator = {"port": arguments["port"], "memory": arguments["memory"]}
    values = {
        "coordinator": {key: value for key, value in coordinator.items() if value is not None},
        "workers": [_worker(spec, number, arguments) for number, spec in enumerate(workers)],
        "models": [_model(text) for text in models],
    }
    return parse_pool(values, Path.cwd())


def _terminal() -> Callable[[str], str] | None:
    if not sys.stdin.isatty():
        return None
    return lambda question: input(f"{question} (empty: no more): ")


def _answers(ask: Callable[[str], str], question: str) -> Iterator[str]:
    while answer := ask(question).strip():
        yield answer


def _model(text: str) -> dict[str, Any]:
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"{text!r} is not NAME=PATH")
    return {"name": name.strip(), "path": path.strip()}


def _key(arguments: Arguments) -> str | None:
    path: Path | None = arguments["key_file"]
    return None if path is None else read_key(path)


def _worker(spec: str, number: int, arguments: Arguments) -> dict[str, Any]:
    place, *devices = [part.strip() for part in spec.split(",")]
    host, colon, port = place.rpartition(":")
    base_port = FIRST_PORT + number * PORTS_EACH
    worker: dict[str, Any]
    if place == "local":
        worker = {"name": f"local{number}", "start": "local", "port": base_port}
    elif colon and port.isdecimal():
        worker = {"name": f"{_short(host)}-{port}", "start": "by_hand", "host": host}
        worker |= {"port": int(port)}
        if arguments["unencrypted_network"] and not is_loopback(host):
            worker["unencrypted_network"] = True
        if arguments["key_file"] is not None:
            worker["key_file"] = str(arguments["key_file"].absolute())
    else:
        worker = {"name": _short(place), "start": "ssh", "host": place, "port": base_port}
    if devices:
        worker["gpus"] = [_gpu(device) for device in devices]
    return worker


def _short(host: str) -> str:
    """A name out of [USER@]HOST."""
    name = host.rpartition("@")[2]
    if is_loopback(name):
        return "here"
    return name if name.replace(".", "").isdecimal() else name.partition(".")[0]


def _gpu(text: str) -> dict[str, Any]:
    device, equals, memory = text.partition("=")
    return {"device": device} | ({"memory": memory} if equals else {})
