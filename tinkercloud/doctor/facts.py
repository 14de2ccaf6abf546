"""Gathering facts: each probe runs in a process of its own, so that the doctor always answers."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tinkercloud.doctor.finding import Facts
from tinkercloud.doctor.requirements import requirements
from tinkercloud.doctor.target import Target

PROBES = Path(__file__).with_name("probes.py")
NO_ANSWER = "no answer within"
IMPORTS = {  # what is imported -> its distribution
    "apex.optimizers": "apex",
    "flash_attn": "flash-attn",
    "megatron.core": "megatron-core",
    "sglang_router": "sglang-router",
    "torch_memory_saver": "torch-memory-saver",
    "transformer_engine.pytorch": "transformer-engine",
}
SAME_ON_ALL_NODES = ("tinkercloud", "torch", "megatron-core", "ray", "transformer-engine", "sglang")


def gather(target: Target, names: Iterable[str]) -> Facts:
    """The named facts; takes as long as the slowest probe, at most twice the time-out."""
    probes = commands(target)
    with ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2))) as threads:
        running = {
            name: threads.submit(run, *probes[name], target.timeout_s)
            for name in probes
            if name in {*names}
        }
        return skipped(target) | {name: answer.result() for name, answer in running.items()}


def skipped(target: Target) -> dict[str, dict[str, str]]:
    """Facts that need no probe: it would be of no use for this target."""
    facts: dict[str, dict[str, str]] = {}
    if target.backend != "cluster":
        facts["ray"] = {"skipped": f"not tried for the backend {target.backend}"}
    if target.sglang_python is None:
        facts["sglang"] = {"error": "its command names no Python: what it starts is unknown"}
    return facts


def commands(target: Target) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of the fact -> the Python that runs its probe, the probe and its arguments."""
    folder = str(target.data_dir)
    probes: dict[str, tuple[str, ...]] = {
        "torch": ("torch",),
        "engine": ("engine", target.dtype, target.instruction_set),
        "deviation": ("deviation", target.dtype, target.instruction_set),
        "models": ("models", target.backend, *(f"{m.name}={m.path}" for m in target.models)),
        "python": ("python",),
        "versions": ("versions", *requirements("embedded"), *requirements("grammar")),
        "host": ("host", folder, target.host, str(target.port)),
        "driver": ("driver",),
        **{name: ("package", module, name) for module, name in IMPORTS.items()},
    }
    if target.backend == "cluster":
        probes["ray"] = ("ray", target.ray_address, folder, ",".join(SAME_ON_ALL_NODES))
    pythons = {name: (target.python, arguments) for name, arguments in probes.items()}
    if target.sglang_python is not None:
        pythons["sglang"] = (target.sglang_python, ("sglang",))
    return pythons


def run(python: str, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """A probe's answer, or {"error": why there is none}."""
    command = [python, str(PROBES), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    try:
        # A session of its own, so that what a probe started (Ray's processes) ends with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, **pipes
        )
    except OSError as error:
        return {"error": f"cannot run {python}: {error.strerror}"}
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"{NO_ANSWER} {timeout_s:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return _parsed(out, err, process.returncode)


def _parsed(out: str, err: str, status: int) -> dict[str, Any]:
    # Packages print while they are imported: the answer is the last line.
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(out.strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    reason = err.strip().splitlines()[-1:] or ["nothing on standard error"]
    return {"error": f"ended with status {status}: {reason[0]}"}
