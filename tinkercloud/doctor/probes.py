"""What one Python environment can say of itself: `python probes.py NAME [ARGUMENT ...]`.

`doctor` runs this file, never imports it, so that a package that crashes or hangs costs one answer
and not the doctor, and so that any Python can be asked, SGLang's too: the standard library only,
until a probe imports what it is about. The answer is the last line of standard output, as JSON;
{"error": ...} where the probe failed.
"""

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def python() -> dict[str, Any]:
    return {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}


def versions(*distributions: str) -> dict[str, Any]:
    """Of each distribution, None where it is not installed."""
    return {name: _version(name) for name in distributions}


def host(data_dir: str, address: str, port: str) -> dict[str, Any]:
    """Limits and devices of this machine. memlock and open files: -1 is unlimited."""
    import resource
    import shutil

    folder = Path(data_dir)
    while not folder.exists():
        folder = folder.parent
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "writable": os.access(folder, os.W_OK),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "open_files": open_files[1],
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "interfaces": _interfaces(),
        "port_error": _port_error(address, int(port)),
    }


def _interfaces() -> list[str]:
    up: list[str] = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        with contextlib.suppress(OSError):
            # loopback says "unknown" and counts as none
            if (folder / "operstate").read_text().strip() == "up" or folder.name.startswith("ib"):
                up.append(folder.name)
    return up


def _port_error(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def driver() -> dict[str, Any]:
    """By nvidia-smi."""
    import subprocess

    fields = "driver_version,name,memory.total,compute_cap"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        told = (done.stdout + done.stderr).strip().splitlines()
        return {"error": f"nvidia-smi ended with status {done.returncode}: {' '.join(told[:1])}"}
    gpus = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return {"version": gpus[0].split(",")[0] if gpus else "", "gpus": gpus}


def package(module: str, distribution: str) -> dict[str, Any]:
    """Imported, since being installed is not working. version: the distribution's."""
    version = _version(distribution)
    imported = importlib.import_module(module)
    return {"version": version or str(getattr(imported, "__version__", "unknown"))}


def torch() -> dict[str, Any]:
    import torch

    answer: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    answer["gpus"] = gpus = []
    if not torch.cuda.is_available():
        return answer
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "free_bytes": free_bytes,
                "total_bytes": total_bytes,
            }
        )
    answer["no_peer_access"] = [
        [one, other]
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    nccl = importlib.import_module("torch.cuda.nccl")
    answer["nccl"] = ".".join(map(str, nccl.version()))
    return answer


def sglang() -> dict[str, Any]:
    """SGLang, its kernels and what it would speculate with; each may fail alone."""
    answer: dict[str, Any] = {
        "version": importlib.metadata.version("sglang"),
        "python": python()["version"],
        "torch": _version("torch"),
        "torch_memory_saver": _version("torch_memory_saver"),
        "kernels": _version("sglang-kernel") or _version("sgl-kernel"),
    }
    tried = _answer_of(lambda: package("sgl_kernel", "sglang-kernel"))
    answer |= {"kernels_error": tried["error"]} if "error" in tried else {}
    answer["speculative"] = _speculative_algorithms()
    return answer


def _speculative_algorithms() -> list[str]:
    """Read, not imported: importing SGLang's runtime needs its GPU."""
    found = importlib.util.find_spec("sglang")
    for folder in (found and found.submodule_search_locations) or []:
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
    """Start a local Ray (address "") or join one; ask every node what it has and what it sees.

    distributions: names, separated by commas, whose versions every node tells.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        # Ray itself tries for minutes.
        socket.create_connection((host, int(port)), timeout=10).close()
    where: dict[str, Any] = {"address": address or "local"}
    if not address:
        where |= {"num_cpus": 1, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    token = Path(data_dir) / f".doctor-{uuid.uuid4().hex}"
    names = distributions.split(",")

    def look() -> dict[str, Any]:
        # Sent to the node as it is, so it may use nothing of this file.
        import importlib.metadata as metadata
        import os
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
        asked = [
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in alive
        ]
        # Each of its own, so that one node that does not answer hides no other.
        answers = [_answer_of(lambda r=reference: ray.get(r, timeout=30)) for reference in asked]
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
        ray.shutdown()
    return {"version": ray.__version__, "nodes": list(map(_node, alive, answers))}


def _node(node: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    resources = node["Resources"]
    return {
        "address": node["NodeManagerAddress"],
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "object_store_bytes": resources.get("object_store_memory", 0),
        **told,
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
    probe.__name__: probe for probe in (python, versions, host, driver, package, torch, sglang, ray)
}


def main(name: str, *arguments: str) -> None:
    # A script's folder comes first on its path, and ours holds files named as packages are.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    answer = _answer_of(lambda: PROBES[name](*arguments))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
