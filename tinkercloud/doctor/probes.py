"""Facts of one Python environment: `python probes.py NAME [ARGUMENT ...]`.

The doctor runs this file in a process for each probe and never imports it. So a package that
crashes or hangs costs one answer, and any Python can be probed, SGLang's too: the standard library
only, until a probe imports what it is about. The answer is the last line of standard output, as
JSON; {"error": ...} where the probe failed.
"""

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # `main` takes it away again

from machine_probes import driver, host  # noqa: E402


def python() -> dict[str, Any]:
    return {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}


def versions(*distributions: str) -> dict[str, Any]:
    """Of each distribution, None where it is not installed."""
    return {name: _version(name) for name in distributions}


def package(module: str, distribution: str) -> dict[str, Any]:
    """Imported, since an installed package may still fail to load. version: the distribution's."""
    version = _version(distribution)
    loaded = importlib.import_module(module)
    return {"version": version or str(getattr(loaded, "__version__", "unknown"))}


def torch() -> dict[str, Any]:
    import torch

    answer: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    answer["gpus"] = gpus = []
    if not torch.cuda.is_available():
        return answer
    count = torch.cuda.device_count()
    gpus += [_gpu(index) for index in range(count)]
    answer["no_peer_access"] = [
        [reader, owner]
        for reader in range(count)
        for owner in range(count)
        if reader != owner and not torch.cuda.can_device_access_peer(reader, owner)
    ]
    nccl = importlib.import_module("torch.cuda.nccl")
    answer["nccl"] = ".".join(map(str, nccl.version()))
    return answer


def _gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
    }


def engine(dtype: str, instruction_set: str = "auto") -> dict[str, Any]:
    """What the embedded engine would compute on, by its own choice, and with which kernels.

    Compiles them if need be, as the engine does when it first starts.
    """
    _find_our_package()

    from tinkercloud.config import c_compiler, force_instruction_set
    from tinkercloud.embedded.forward.kernel_choice import has_kernels
    from tinkercloud.embedded.forward.row_invariance import verdicts
    from tinkercloud.embedded.model.device import (
        choose_device,
        choose_dtype,
        instruction_set_in_use,
        set_up_torch,
        usable_cores,
    )

    if instruction_set != "auto":
        force_instruction_set(instruction_set)
    device = choose_device()
    chosen, best = choose_dtype(dtype, device), choose_dtype("auto", device)
    warnings = _Warnings()
    logging.getLogger("tinkercloud").addHandler(warnings)
    is_cuda = device.type == "cuda"
    in_use = instruction_set_in_use(device)
    compiled = has_kernels(device, chosen) if is_cuda else in_use != "none"
    set_up_torch(usable_cores())  # as the engine does
    return {
        "device": device.type,
        "gpu": _gpu(0) if is_cuda else {},
        "cores": usable_cores(),
        "dtype": str(chosen).removeprefix("torch."),
        "best_dtype": str(best).removeprefix("torch."),
        "kernels": ("Triton" if is_cuda else "C") if compiled else "",
        "kernels_error": "" if compiled else " ".join(warnings.texts) or "they do not run here",
        "instruction_set": in_use,
        "compiler": c_compiler() or "",
        "row_invariant": {} if is_cuda else verdicts(chosen),
    }


def deviation(dtype: str, instruction_set: str = "auto") -> dict[str, Any]:
    """How far log-probabilities in training are from the sampled ones, of a tiny random model, and
    whether they are promised to be equal."""
    _find_our_package()

    from tinkercloud.config import force_instruction_set
    from tinkercloud.embedded.model.device import (
        choose_device,
        choose_dtype,
        set_up_torch,
        usable_cores,
    )
    from tinkercloud.embedded.native.train_bindings import has_compiled_pass
    from tinkercloud.embedded.process.deviation import measure_tiny

    if instruction_set != "auto":
        force_instruction_set(instruction_set)
    device = choose_device()
    chosen = choose_dtype(dtype, device)
    set_up_torch(usable_cores())
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_tiny(chosen, device, usable_cores(), Path(folder))
    return {
        "promised": has_compiled_pass(device, chosen),
        "tokens": measured.num_tokens,
        "largest": measured.largest,
    }


def _find_our_package() -> None:
    """Also where it is not installed. Not in every probe: the folder may be our Python's
    site-packages, whose distributions another Python must not count as its own."""
    sys.path.append(str(HERE.parents[1]))


class _Warnings(logging.Handler):
    """The reason why kernels are not used is a warning in the log of whoever chooses them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def models(backend: str, *sources: str) -> dict[str, Any]:
    """sources: NAME=PATH. By name: architecture, and parameters where they can be counted."""
    named = (source.partition("=") for source in sources)
    return {name: _answer_of(lambda p=Path(path): _model(backend, p)) for name, _, path in named}


def _model(backend: str, path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"error": f"no model at {path}"}
    # The cluster has families that the embedded backend lacks; `tinkercloud plan` judges them.
    if backend == "embedded" and importlib.util.find_spec("torch") is not None:
        _find_our_package()
        from tinkercloud.weights.loader import read_config

        config = read_config(path)
        return {"architecture": config.model_type, "parameters": config.num_parameters}
    if path.is_file():
        return {"architecture": "GGUF"}
    return {"architecture": json.loads((path / "config.json").read_text())["model_type"]}


def sglang() -> dict[str, Any]:
    """SGLang, its kernels and the algorithms it can speculate with; each may fail alone."""
    answer: dict[str, Any] = {
        "version": importlib.metadata.version("sglang"),
        "python": python()["version"],
        "torch": _version("torch"),
        "torch_memory_saver": _version("torch_memory_saver"),
        "kernels": _version("sglang-kernel") or _version("sgl-kernel"),
    }
    kernels = _answer_of(lambda: package("sgl_kernel", "sglang-kernel"))
    answer |= {"kernels_error": kernels["error"]} if "error" in kernels else {}
    answer["speculative"] = _speculative_algorithms()
    return answer


def _speculative_algorithms() -> list[str]:
    """Read, not imported: importing SGLang's runtime needs its GPU."""
    spec = importlib.util.find_spec("sglang")
    for folder in (spec and spec.submodule_search_locations) or []:
        source = Path(folder) / "srt" / "speculative" / "spec_info.py"
        if not source.is_file():
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == "SpeculativeAlgorithm":
                members = [item.targets[0] for item in node.body if isinstance(item, ast.Assign)]
                names = {member.id for member in members if isinstance(member, ast.Name)}
                return sorted(names - {"NONE"})
    return []


def ray(address: str, data_dir: str, distributions: str) -> dict[str, Any]:
    """Start a local Ray (address "") or join one; by node, its resources and what it sees.

    distributions: names, separated by commas, whose versions every node reports.
    """
    _find_our_package()
    from tinkercloud.cluster.gpus.ray_access import prepare

    access = prepare(address)  # before Ray is imported
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where: dict[str, Any] = {"address": address or "local"}
    if not address:
        where |= {"num_cpus": 1, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    token = Path(data_dir) / f".doctor-{uuid.uuid4().hex}"
    names = distributions.split(",")

    def look() -> dict[str, Any]:
        # Ray pickles this function by value and nothing else of this file: it imports its own.
        import importlib.metadata as metadata
        import sys

        versions: dict[str, str | None] = {}
        for name in names:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = None
        room = os.statvfs("/dev/shm")
        return {
            "python": ".".join(map(str, sys.version_info[:3])),
            "versions": versions,
            "sees_data_dir": os.path.exists(str(token)),
            "shm_bytes": room.f_frsize * room.f_blocks,
        }

    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
        alive = [node for node in ray.nodes() if node["Alive"]]
        task = ray.remote(num_cpus=0)(look)
        references = [
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in alive
        ]
        # One call each: a node that does not answer must not hide the others' answers.
        answers = [_answer_of(lambda r=ref: ray.get(r, timeout=30)) for ref in references]
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
        ray.shutdown()
    return {"version": ray.__version__, "access": access, "nodes": list(map(_node, alive, answers))}


def _node(node: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    resources = node["Resources"]
    return {
        "address": node["NodeManagerAddress"],
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "object_store_bytes": resources.get("object_store_memory", 0),
        **answer,
    }


def _answer_of(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return probe()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer
        return {"error": _shown(error)}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shown(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (
        *(python, versions, host, driver, package, torch, engine, deviation),
        *(models, sglang, ray),
    )
}


def main(name: str, *arguments: str) -> None:
    # A script's folder comes first on its path; ours would hide packages named as its files are.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    answer = _answer_of(lambda: PROBES[name](*arguments))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
