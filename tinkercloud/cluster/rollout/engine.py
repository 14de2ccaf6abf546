"""One SGLang server process, owned by one Ray actor: it starts, watches and ends with it."""

import random
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud.config import thread_environment, with_engine_key
from tinkercloud.errors import EngineDied
from tinkercloud.planning.plan import SglangArguments

LOG_LINES = 40
# SGLang keeps a few tokens of the context to itself; with these added, requests can use all of the
# planned length.
CONTEXT_RESERVE = 8
_POLL_S = 0.5
_PORTS = (21000, 32000)
_STOP_S = 25.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server process is started. gpus: as this node numbers them; empty: as they are."""

    command: tuple[str, ...]
    options: tuple[str, ...]
    log_path: Path
    host: str | None = None  # None: this node's address in the cluster
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    start_timeout_s: float = 900.0
    key: str = field(default="", repr=False)
    wait: bool = True  # False for the further nodes of an engine: they answer no requests


def server_options(
    model_path: Path, arguments: SglangArguments, kv_tokens: int | None
) -> tuple[str, ...]:
    """The plan's arguments on SGLang 0.5.23's command line."""
    options = [
        *("--model-path", str(model_path)),
        *("--weight-version", "base"),
        *("--tp-size", str(arguments.tp_size)),
        *("--nnodes", str(arguments.nnodes)),
        *("--dtype", arguments.dtype),
        *("--mem-fraction-static", f"{arguments.mem_fraction_static:g}"),
        *("--context-length", str(arguments.context_length + CONTEXT_RESERVE)),
        *("--max-running-requests", str(arguments.max_running_requests)),
        *("--skip-server-warmup", "--sleep-on-idle", "--incremental-streaming-output"),
    ]
    if not (model_path / "tokenizer.json").is_file():
        options.append("--skip-tokenizer-init")  # requests and answers are token ids anyway
    if kv_tokens is not None:
        options += ["--max-total-tokens", str(kv_tokens)]
    if arguments.enable_memory_saver:
        options.append("--enable-memory-saver")
    if arguments.enable_weights_cpu_backup:
        options.append("--enable-weights-cpu-backup")
    if arguments.enable_lora:
        options += ["--enable-lora", "--max-lora-rank", str(arguments.max_lora_rank)]
        options += ["--max-loras-per-batch", str(arguments.max_loras_per_batch)]
        options += ["--lora-target-modules", *arguments.lora_target_modules]
    return tuple(options)


class RolloutEngine:
    """Start it as a Ray actor with max_concurrency of at least 4: `start` blocks for minutes."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> str:
        """The server's URL once it generates. Raises EngineDied with the end of its log."""
        host = self._launch.host or _node_address()
        for attempt in range(3):
            port = free_port()
            self._spawn(host, port)
            url = f"http://{host}:{port}"
            try:
                if self._launch.wait:
                    self._await_health(url)
                return url
            except EngineDied:
                self.stop()
                # Between the choice of a port and its bind, another process may have taken it.
                if attempt == 2 or not port_was_taken(self._launch.log_path, self._log_start):
                    raise
        raise AssertionError("unreachable")

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def process_id(self) -> int | None:
        """Of the guard, whose only child is the server."""
        return self._process.pid if self._process is not None else None

    def memory_used(self) -> int:
        """Bytes in use on this engine's GPUs, by whomever; 0 without GPUs."""
        if not self._launch.gpus:
            return 0
        gpus = ",".join(map(str, self._launch.gpus))
        query = ["nvidia-smi", f"--id={gpus}", "--query-gpu=memory.used"]
        answer = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
        )
        return sum(int(line) for line in answer.stdout.split() if line.isdigit()) * 1024**2

    def stop(self) -> None:
        """End the server and everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self, host: str, port: int) -> None:
        launch = self._launch
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [*launch.command, *launch.options, "--host", host, "--port", str(port)]
        environment = {
            **thread_environment(),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            **launch.environment,
        }
        if launch.key:
            environment = with_engine_key(environment, launch.key)
        if launch.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
        with launch.log_path.open("ab") as log:
            self._log_start = log.tell()
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinkercloud.cluster.gpus.process_guard", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ray kills a dead worker's process group; the guard must survive that, since it
                # ends the server.
                start_new_session=True,
            )

    def _await_health(self, url: str) -> None:
        timeout_s = self._launch.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.running():
                raise EngineDied(f"the SGLang server ended while it started; {self._log_end()}")
            if _answers(f"{url}/health"):
                return
            time.sleep(_POLL_S)
        raise EngineDied(
            f"the SGLang server did not answer within {timeout_s:g} s; {self._log_end()}"
        )

    def _log_end(self) -> str:
        lines = self._launch.log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"the end of {self._launch.log_path}:\n" + "\n".join(lines)


def port_was_taken(log_path: Path, start: int) -> bool:
    """Judged by the log from that byte on. asyncio, torch, ZeroMQ and Rust all use these words."""
    return b"address already in use" in log_path.read_bytes()[start:].lower()


def free_port() -> int:
    """Free on every address of this node. Below the kernel's range for outgoing connections
    (net.ipv4.ip_local_port_range, from 32768): a server binds its port many seconds after this
    choice, and a connection would take it in between."""
    for _ in range(100):
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise EngineDied(f"no port is free from {_PORTS[0]} to {_PORTS[1]}")


def _node_address() -> str:
    import ray.util

    return ray.util.get_node_ip_address()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
