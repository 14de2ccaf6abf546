"""What this installation can do, each with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tinkercloud.doctor.checks import CHECKS
from tinkercloud.doctor.finding import Facts
from tinkercloud.doctor.machine_checks import gpus_of
from tinkercloud.doctor.target import Target


@dataclass(frozen=True, slots=True)
class Capability:
    available: bool
    how: str


Capabilities = Mapping[str, Mapping[str, Capability]]
"""Group -> name -> capability."""


def capabilities(target: Target, facts: Facts) -> Capabilities:
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
    kinds = ("tensor", "sequence", "pipeline", "expert", "data")
    attention = not target.needs_gpus or _has(facts, "transformer-engine")
    needs = how if attention else "needs Transformer Engine's attention"
    return dict.fromkeys(kinds, Capability(many, how)) | {
        "context": Capability(many and attention, needs)
    }


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
    names = facts["sglang"].get("speculative", [])
    if not names:
        return {"SGLang's": Capability(False, "SGLang is missing")}
    return {name: Capability(True, f"SGLang {facts['sglang']['version']}") for name in names}
