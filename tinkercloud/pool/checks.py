"""Whether a pool can run, and what to do where it cannot."""

import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import (
    INSTALL,
    LLAMA_SERVER,
    RPC_SERVER,
    find_program,
    help_text,
    knows_rpc,
    version,
)
from tinkercloud.pool.drafting import DRAFT_FLAGS, draft_text
from tinkercloud.pool.layer_plan import Device, plan_layers
from tinkercloud.pool.llama_server import FLAGS
from tinkercloud.pool.model_file import read_model_file
from tinkercloud.pool.pool_file import PoolFile
from tinkercloud.pool.worker_link import WorkerLink, WorkerLost

UP_S = 60.0
LIST_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """remedy: what to do; empty where all is well."""

    subject: str
    fact: str
    remedy: str = ""

    def line(self) -> str:
        mark = "ok     " if not self.remedy else "missing"
        return f"{mark} {self.subject}: {self.fact}" + (f"; {self.remedy}" if self.remedy else "")


def diagnose(pool: PoolFile, folder: Path) -> Iterator[Finding]:
    """Starts the workers that the pool would start, asks all of them, and ends those again. For a
    pool that does not run."""
    program = None
    for finding, usable in _programs(pool):
        program = usable or program
        yield finding
    yield _port(pool)
    links = [WorkerLink(worker, folder) for worker in pool.workers]
    devices = list[Device]()
    try:
        for link in links:
            link.start()
        for link in links:
            finding = _worker(link)
            yield finding
            if not finding.remedy:
                sharing = sum(each.is_on_machine_of(link) and each.shares_ram for each in links)
                devices += link.devices(sharing)
        if program is not None and devices:
            yield _handshake(program, devices)
    finally:
        for link in links:
            link.end()
    yield from _models(pool, devices)


def _programs(pool: PoolFile) -> Iterator[tuple[Finding, Path | None]]:
    try:
        program = find_program(LLAMA_SERVER, pool.coordinator.llama_server)
    except ConfigError as error:
        yield Finding("llama-server", "not found", str(error)), None
        return
    options = help_text(program)
    drafts = any(model.draft is not None for model in pool.models)
    flags = (*FLAGS, *DRAFT_FLAGS) if drafts else FLAGS
    unknown = [flag for flag in flags if flag not in options]
    if not version(program):
        yield Finding("llama-server", f"{program} does not run", "build it for this machine"), None
    elif unknown:
        text = f"{program} does not know {', '.join(unknown)}"
        yield Finding("llama-server", text, f"take a newer one: {INSTALL}"), None
    elif pool.workers and not knows_rpc(program):
        yield Finding("llama-server", f"{program} is built without RPC", INSTALL), None
    else:
        yield Finding("llama-server", f"{program}, {version(program)}"), program
    for worker in pool.workers:
        if worker.start == "local":
            try:
                yield Finding(worker.name, f"{find_program(RPC_SERVER, worker.rpc_server)}"), None
            except ConfigError as error:
                yield Finding(worker.name, "no RPC server", str(error)), None


def _port(pool: PoolFile) -> Finding:
    host, port = pool.coordinator.host, pool.coordinator.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "end the program that listens there, or choose another coordinator.port"
            return Finding(f"port {port}", f"cannot listen on {host}: {error.strerror}", remedy)
    return Finding(f"port {port}", f"free on {host}")


def _worker(link: WorkerLink) -> Finding:
    deadline = time.monotonic() + UP_S
    name, began = link.worker.name, time.monotonic()
    try:
        while not link.is_up():
            if time.monotonic() > deadline:
                remedy = f"start it (tinkercloud pool worker), or look at {link.log}"
                return Finding(name, f"does not answer within {UP_S:.0f} s", remedy)
            time.sleep(0.2)
    except (WorkerLost, ConfigError) as error:
        return Finding(name, str(error), f"see {link.log}")
    protocols = ", ".join(f"{device} RPC {text}" for device, text in link.protocols.items())
    return Finding(name, f"up after {time.monotonic() - began:.1f} s: {protocols}")


def _handshake(program: Path, devices: list[Device]) -> Finding:
    """By llama-server itself, which refuses RPC servers of another version."""
    endpoints = [device.endpoint for device in devices if device.endpoint is not None]
    command = [str(program), "--rpc", ",".join(endpoints), "--list-devices"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_S
        )
    except subprocess.TimeoutExpired:
        return Finding("RPC", f"no answer within {LIST_S:.0f} s", "is another coordinator on it?")
    listed = [endpoint for endpoint in endpoints if endpoint in done.stdout]
    if done.returncode == 0 and listed == endpoints:
        return Finding("RPC", f"llama-server sees {len(listed)} devices")
    reason = " | ".join((done.stdout + done.stderr).splitlines()[-3:])
    remedy = "install the same version of llama.cpp on every machine"
    return Finding("RPC", f"llama-server does not take the workers: {reason}", remedy)


def _models(pool: PoolFile, devices: list[Device]) -> Iterator[Finding]:
    coordinator = pool.coordinator
    cpus = [Device("coordinator", "CPU", coordinator.memory)] if coordinator.memory else []
    gpus = [Device("coordinator", gpu.device, gpu.memory or 0) for gpu in coordinator.gpus]
    for model in pool.models:
        try:
            file = read_model_file(model.path)
            plan = plan_layers(file, model, [*cpus, *devices, *gpus], coordinator.reserve)
            draft_text(model)
        except ConfigError as error:
            yield Finding(model.name, "cannot be served", str(error))
            continue
        held = ", ".join(f"{s.device.label} {plan.layers_text(s)}" for s in plan.shares)
        if file.trained_context and model.context > file.trained_context * model.parallel:
            remedy = f"it is trained for {file.trained_context} tokens; take a smaller context"
            yield Finding(model.name, f"context {model.context}", remedy)
        else:
            yield Finding(model.name, held)
