"""Can the chosen backend run here, and what could it do: what `tinkercloud doctor` answers.

`ask` gathers facts, each from a process of its own (`probes`), so that this always answers; the
checks (`findings`) and the capability report are pure functions of those facts.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tinkercloud.config import Config
from tinkercloud.doctor.checks import CHECKS, Check, Facts, Finding, gpus_of
from tinkercloud.doctor.requirements import requirements

PROBES = Path(__file__).with_name("probes.py")
IMPORTS = {  # what is imported, because being installed is not working -> its distribution
    "apex.optimizers": "apex",
    "flash_attn": "flash-attn",
    "megatron.core": "megatron-core",
    "sglang_router": "sglang-router",
    "torch_memory_saver": "torch-memory-saver",
    "transformer_engine.pytorch": "transformer-engine",
}
SAME_ON_ALL_NODES = ("tinkercloud", "torch", "megatron-core", "ray", "transformer-engine", "sglang")


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked about.

    sglang_python None: SGLang's command starts something that is no Python. needs_gpus False: ranks
    and engines run on CPUs. timeout_s: how long one probe may take.
    """

    backend: str
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    ray_address: str = ""
    python: str = sys.executable
    sglang_python: str | None = sys.executable
    needs_gpus: bool = True
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 120.0


def target_of(config: Config, environ: Mapping[str, str]) -> Target:
    cluster = config.cluster
    return Target(
        backend=config.backend,
        data_dir=config.data_dir,
        host=config.host,
        port=config.port,
        ray_address=cluster.ray_address or "",
        sglang_python=python_of(shlex.split(cluster.sglang_command or "")),
        needs_gpus=cluster.device == "cuda",
        variables=environ,
    )


def python_of(command: Sequence[str]) -> str | None:
    """The Python that a command starts; this one for an empty command, None where it has none."""
    if not command:
        return sys.executable
    named = (word for word in command if re.fullmatch(r"python[\d.]*", Path(word).name))
    return next(named, None)


# facts


def ask(target: Target) -> Facts:
    """Every probe's answer; takes as long as the slowest, at most twice the time-out."""
    with ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2))) as threads:
        asked = {
            name: threads.submit(_probe, python, arguments, target.timeout_s)
            for name, (python, arguments) in _questions(target).items()
        }
        facts = {name: answer.result() for name, answer in asked.items()}
    if target.backend != "cluster":
        facts["ray"] = {"skipped": f"not tried for the backend {target.backend}"}
    if target.sglang_python is None:
        facts["sglang"] = {"error": "its command names no Python: nothing can be told"}
    return facts


def _questions(target: Target) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of the answer -> the Python that is asked, the probe and its arguments."""
    folder = str(target.data_dir)
    questions: dict[str, tuple[str, ...]] = {
        "torch": ("torch",),
        "python": ("python",),
        "versions": ("versions", *requirements("embedded")),
        "host": ("host", folder, target.host, str(target.port)),
        "driver": ("driver",),
        **{name: ("package", module, name) for module, name in IMPORTS.items()},
    }
    if target.backend == "cluster":
        questions["ray"] = ("ray", target.ray_address, folder, ",".join(SAME_ON_ALL_NODES))
    asked = {name: (target.python, arguments) for name, arguments in questions.items()}
    if target.sglang_python is not None:
        asked["sglang"] = (target.sglang_python, ("sglang",))
    return asked


def _probe(python: str, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    command = [python, str(PROBES), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    try:
        # A session of its own: what a probe started (Ray's processes) ends with it.
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, **pipes
        )
    except OSError as error:
        return {"error": f"cannot run {python}: {error.strerror}"}
    with started:
        try:
            out, err = started.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {timeout_s:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    return _parsed(out, err, started.returncode)


def _parsed(out: str, err: str, status: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(out.strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    told = err.strip().splitlines()[-1:] or ["nothing on standard error"]
    return {"error": f"ended with status {status}: {told[0]}"}


# findings


@dataclass(frozen=True, slots=True)
class Line:
    """blocks: the chosen backend cannot run because of it."""

    name: str
    purpose: str
    finding: Finding
    blocks: bool


@dataclass(frozen=True, slots=True)
class Capability:
    available: bool
    how: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """capabilities: group -> name -> Capability."""

    backend: str
    lines: tuple[Line, ...]
    capabilities: Mapping[str, Mapping[str, Capability]]

    @property
    def can_run(self) -> bool:
        return not any(line.blocks for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        checks = [
            {"name": line.name, "purpose": line.purpose, **asdict(line.finding)}
            | {"blocks": line.blocks}
            for line in self.lines
        ]
        capabilities = {
            group: {name: asdict(item) for name, item in items.items()}
            for group, items in self.capabilities.items()
        }
        return {
            "backend": self.backend,
            "can_run": self.can_run,
            "checks": checks,
            "capabilities": capabilities,
        }


def diagnose(target: Target, facts: Facts) -> Diagnosis:
    lines = tuple(_line(check, target, facts) for check in CHECKS)
    return Diagnosis(target.backend, lines, capabilities(target, facts))


def _line(check: Check, target: Target, facts: Facts) -> Line:
    finding = check.look(target, facts)
    blocks = finding.status == "missing" and target.backend in check.needed_by
    if finding.status == "missing" and not blocks:
        finding = replace(finding, status="warning")
    return Line(check.name, check.purpose, finding, blocks)


def report(diagnosis: Diagnosis) -> str:
    """For people: each check with what to do about it, then what this installation can do."""
    lines: list[str] = []
    for line in diagnosis.lines:
        finding = line.finding
        mark = "MISSING" if line.blocks else finding.status
        lines.append(f"{mark:8} {line.name:19} {finding.found} ({line.purpose})")
        if finding.remedy and finding.status != "ok":
            lines.append(f"{'':8} {'':19} -> {finding.remedy}")
    for group, items in diagnosis.capabilities.items():
        lines.append(f"\n{group}")
        lines += [
            f"  {'yes' if item.available else 'no ':3} {name:22} {item.how}"
            for name, item in items.items()
        ]
    verdict = "can run" if diagnosis.can_run else "cannot run"
    return "\n".join([*lines, f"\nThe backend {diagnosis.backend} {verdict} here."])


# capabilities


def capabilities(target: Target, facts: Facts) -> dict[str, dict[str, Capability]]:
    """What this installation can do, each with the reason."""
    return {
        "backends": {name: _backend(name, target, facts) for name in ("embedded", "cluster")},
        "training parallelism": _parallelism(target, facts),
        "attention kernels": _attention(target, facts),
        "weight sync": _weight_sync(target, facts),
        "memory offload": _offload(target, facts),
        "speculative decoding": _speculative(facts),
    }


def _has(facts: Facts, name: str) -> bool:
    return "error" not in facts[name]


def _backend(name: str, target: Target, facts: Facts) -> Capability:
    seen = replace(target, backend=name)
    missing = [
        check.name
        for check in CHECKS
        if name in check.needed_by and check.look(seen, facts).status == "missing"
    ]
    if missing:
        return Capability(False, f"missing: {', '.join(missing)}")
    untried = name == "cluster" and "skipped" in facts["ray"]
    return Capability(True, "Ray was not tried" if untried else "everything that it needs is here")


def _parallelism(target: Target, facts: Facts) -> dict[str, Capability]:
    if not _has(facts, "megatron-core"):
        none = Capability(False, "Megatron-core is missing")
        return dict.fromkeys(("tensor", "sequence", "pipeline", "expert", "data", "context"), none)
    ranks = gpus_of(target, facts) if target.needs_gpus else None
    many = ranks is None or ranks > 1
    how = "any number of CPU ranks" if ranks is None else f"{ranks} GPUs"
    found = {
        name: Capability(many, how) for name in ("tensor", "sequence", "pipeline", "expert", "data")
    }
    attention = not target.needs_gpus or _has(facts, "transformer-engine")
    needs = how if attention else "needs Transformer Engine's attention"
    return found | {"context": Capability(many and attention, needs)}


def _attention(target: Target, facts: Facts) -> dict[str, Capability]:
    engine, flash = _has(facts, "transformer-engine"), _has(facts, "flash-attn")
    if not target.needs_gpus:
        return {"of the prepared ranks": Capability(True, "cluster.prepare brings its own")}
    needs = "needs Transformer Engine"
    return {
        "cuDNN, packed": Capability(engine, "Transformer Engine" if engine else needs),
        "flash-attn": Capability(
            engine and flash, "through Transformer Engine" if engine and flash else "optional"
        ),
        "of the engines": Capability(
            "kernels_error" not in facts["sglang"] and _has(facts, "sglang"), "SGLang's kernels"
        ),
    }


def _weight_sync(target: Target, facts: Facts) -> dict[str, Capability]:
    engines = _has(facts, "sglang")
    same = engines and facts["sglang"].get("torch") == facts["torch"].get("version")
    differ = f"torch {facts['torch'].get('version')} here, {facts['sglang'].get('torch')} there"
    return {
        "tensor": Capability(
            bool(same), "shared memory of one machine, one torch" if same else differ
        ),
        "broadcast": Capability(
            engines, "a process group of trainer and engines" if engines else "SGLang is missing"
        ),
        "disk": Capability(
            engines, "files in data_dir, seen by all nodes" if engines else "SGLang is missing"
        ),
    }


def _offload(target: Target, facts: Facts) -> dict[str, Capability]:
    saver = "torch_memory_saver"
    there = bool(facts["sglang"].get(saver))
    here = _has(facts, "torch-memory-saver")
    gpus = bool(gpus_of(target, facts))
    return {
        "trainer": Capability(gpus, "to pinned memory" if gpus else "there is no GPU memory"),
        "engines": Capability(
            gpus and there and here, saver if there and here else f"needs {saver} on both sides"
        ),
    }


def _speculative(facts: Facts) -> dict[str, Capability]:
    named = facts["sglang"].get("speculative", [])
    if not named:
        return {"SGLang's": Capability(False, "SGLang is missing")}
    return {name: Capability(True, f"SGLang {facts['sglang']['version']}") for name in named}
