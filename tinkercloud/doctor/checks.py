"""The doctor's table: each check reads facts and says ok, warning or missing, and what to do then.

`facts` maps a probe's name to its answer; {"error": ...} where it has none, {"skipped": ...} where
it was not asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tinkercloud.doctor.requirements import misfit, remedy, requirements

Status = Literal["ok", "warning", "missing"]
Facts = Mapping[str, Mapping[str, Any]]

GIB = 1024**3
MIN_DISK_BYTES = 20 * GIB
MIN_SHM_BYTES = 8 * GIB
MIN_OPEN_FILES = 65536
MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores

ALL = ("embedded", "cluster", "fake")
TORCH = ("embedded", "cluster")
CLUSTER = ("cluster",)
OPTIONAL = ()


class Asked(Protocol):
    """What the checks read of `doctor.Target`."""

    @property
    def backend(self) -> str: ...
    @property
    def data_dir(self) -> Path: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def ray_address(self) -> str: ...
    @property
    def needs_gpus(self) -> bool: ...
    @property
    def variables(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """found: the fact. remedy: what to do, empty when nothing."""

    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """purpose: what having it means. needed_by: the backends that cannot run without."""

    name: str
    purpose: str
    needed_by: tuple[str, ...]
    look: Callable[[Asked, Facts], Finding]


def gpus_of(asked: Asked, facts: Facts) -> int:
    """GPUs that the cluster backend could use: those of Ray's nodes, else this machine's."""
    nodes = facts["ray"].get("nodes", [])
    if asked.ray_address:
        return int(sum(node["gpus"] for node in nodes))
    return len(facts["torch"].get("gpus", []))


def _python(asked: Asked, facts: Facts) -> Finding:
    answer = facts["python"]
    if "error" in answer:
        return Finding("missing", answer["error"], "install Python 3.11 or newer")
    return Finding("ok", f"{answer['version']} ({answer['executable']})")


def _extra(extra: str, *besides: str) -> Callable[[Asked, Facts], Finding]:
    """All that the extra asks for is here, except what has a line of its own."""

    def look(asked: Asked, facts: Facts) -> Finding:
        if "error" in facts["versions"]:
            return Finding("missing", facts["versions"]["error"], remedy(extra))
        wanted = sorted(set(requirements(extra)) - {*besides})
        versions = {name: facts["versions"].get(name) for name in wanted}
        wrong = [text for name, found in versions.items() if (text := misfit(name, found, extra))]
        if wrong:
            return Finding("missing", "; ".join(wrong), remedy(extra))
        return Finding("ok", ", ".join(f"{name} {found}" for name, found in versions.items()))

    return look


def _imported(name: str, extra: str, without: str = "") -> Callable[[Asked, Facts], Finding]:
    """A package that can be imported, in a version that the extra allows.

    without: what happens where it is not; then its absence is a warning only.
    """

    def look(asked: Asked, facts: Facts) -> Finding:
        answer = facts[name]
        advice = " ".join(filter(None, (without, remedy(extra))))
        if "error" in answer:
            return Finding("warning" if without else "missing", answer["error"], advice)
        wrong = misfit(name, answer["version"], extra)
        if wrong:
            return Finding("warning", wrong, advice)
        return Finding("ok", answer["version"])

    return look


def _torch(asked: Asked, facts: Facts) -> Finding:
    answer = facts["torch"]
    if "error" in answer:
        return Finding("missing", answer["error"], remedy("embedded"))
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else "a CPU build"
    found = f"{answer['version']}, {build}"
    wrong = misfit("torch", answer["version"], "embedded")
    if wrong:
        return Finding("missing", wrong, remedy("embedded"))
    if not answer["cuda"] and facts["driver"].get("gpus"):
        return Finding("warning", found, "this machine has GPUs: install a CUDA build of torch")
    return Finding("ok", found)


def _driver(asked: Asked, facts: Facts) -> Finding:
    answer = facts["driver"]
    if "error" not in answer:
        return Finding("ok", f"{answer['version']}, {len(answer['gpus'])} GPUs")
    if not asked.needs_gpus or asked.ray_address or asked.backend != "cluster":
        return Finding("warning", "none on this machine", "nothing, unless it should have GPUs")
    return Finding("missing", answer["error"], "install NVIDIA's driver; `nvidia-smi` must run")


def _gpus(asked: Asked, facts: Facts) -> Finding:
    gpus = facts["torch"].get("gpus", [])
    if gpus:
        names = sorted({gpu["name"] for gpu in gpus})
        total = min(gpu["total_bytes"] for gpu in gpus) / GIB
        lowest = min(tuple(gpu["capability"]) for gpu in gpus)
        found = f"{len(gpus)} x {', '.join(names)}, {total:.0f} GiB, capability {_dotted(lowest)}"
        if lowest < MIN_CAPABILITY:
            return Finding("warning", found, "bfloat16 needs capability 8.0; use --dtype float32")
        if len(names) > 1:
            return Finding("warning", found, "GPUs differ: the slowest and smallest rule the plan")
        return Finding("ok", found)
    if not asked.needs_gpus:
        return Finding("ok", "none, and none is asked for (cluster.device cpu)")
    elsewhere = gpus_of(asked, facts)
    if elsewhere:
        return Finding("ok", f"none here; {elsewhere} on Ray's nodes")
    return Finding("missing", "none", "the cluster trains on GPUs; `embedded` needs none")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _peers(asked: Asked, facts: Facts) -> Finding:
    answer = facts["torch"]
    if len(answer.get("gpus", [])) < 2:
        return Finding("ok", "fewer than two GPUs here")
    blocked = answer.get("no_peer_access", [])
    if blocked:
        return Finding(
            "warning",
            f"{len(blocked)} pairs of GPUs cannot read each other's memory",
            "weights go through the host; check IOMMU/ACS settings and `nvidia-smi topo -p2p r`",
        )
    return Finding("ok", "every GPU reads every other's memory")


def _nccl(asked: Asked, facts: Facts) -> Finding:
    version = facts["torch"].get("nccl")
    chosen = {k: v for k, v in sorted(asked.variables.items()) if k.startswith("NCCL_")}
    shown = "".join(f", {key}={value}" for key, value in chosen.items())
    if version is None:
        if not asked.needs_gpus or not facts["torch"].get("gpus"):
            return Finding("ok", f"not used on this machine{shown}")
        return Finding("missing", "torch has none", "install a CUDA build of torch")
    return Finding("ok", f"{version}{shown}")


def _network(asked: Asked, facts: Facts) -> Finding:
    up = facts["host"].get("interfaces", [])
    chosen = asked.variables.get("NCCL_SOCKET_IFNAME", "").lstrip("=^").split(",")
    named = [name for name in chosen if name]
    if named and not asked.variables["NCCL_SOCKET_IFNAME"].startswith("^"):
        if not any(name.startswith(tuple(named)) for name in up):
            return Finding(
                "warning",
                f"NCCL_SOCKET_IFNAME={','.join(named)}, but up are: {', '.join(up) or 'none'}",
                "name an interface that is up on every node",
            )
    elif len(up) > 1 and not named:
        return Finding(
            "warning",
            f"several: {', '.join(up)}",
            "on several nodes set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one they share",
        )
    return Finding("ok", ", ".join(up) or "loopback only")


def _ray(asked: Asked, facts: Facts) -> Finding:
    answer, where = facts["ray"], asked.ray_address or "a local one"
    if "skipped" in answer:
        return Finding("ok", answer["skipped"])
    if "error" in answer:
        advice = remedy("cluster")
        if asked.ray_address:
            advice = f"`ray status --address {asked.ray_address}` must answer from this machine"
        return Finding("missing", f"{where}: {answer['error']}", advice)
    wrong = misfit("ray", answer["version"], "cluster")
    if wrong:
        return Finding("missing", wrong, remedy("cluster"))
    return Finding("ok", f"{answer['version']}, {where}")


def _nodes(asked: Asked, facts: Facts) -> Finding:
    nodes = facts["ray"].get("nodes")
    if nodes is None:
        return _unasked(facts)
    silent = [node for node in nodes if "error" in node]
    if silent:
        told = "; ".join(f"{node['address']}: {node['error']}" for node in silent)
        return Finding("missing", told, "restart Ray on these nodes with the same environment")
    found = ", ".join(
        f"{node['address']} ({node['gpus']:.0f} GPUs, {node['cpus']:.0f} CPUs, "
        f"{node['object_store_bytes'] / GIB:.1f} GiB objects)"
        for node in nodes
    )
    if asked.needs_gpus and not any(node["gpus"] for node in nodes):
        return Finding("missing", found, "no node offers a GPU: start Ray with --num-gpus")
    return Finding("ok", found)


def _same_versions(asked: Asked, facts: Facts) -> Finding:
    nodes = [node for node in facts["ray"].get("nodes", []) if "error" not in node]
    if not nodes:
        return _unasked(facts)
    rows = {"python": [node["python"].rpartition(".")[0] for node in nodes]}
    rows |= {name: [node["versions"][name] for node in nodes] for name in nodes[0]["versions"]}
    differing = [
        f"{name}: {', '.join(sorted({str(found) for found in row}))}"
        for name, row in rows.items()
        if len(set(row)) > 1
    ]
    if differing:
        return Finding("missing", "; ".join(differing), "install one set of versions on all nodes")
    return Finding("ok", f"{len(nodes)} nodes agree")


def _shared(asked: Asked, facts: Facts) -> Finding:
    nodes = [node for node in facts["ray"].get("nodes", []) if "error" not in node]
    if not nodes:
        return _unasked(facts)
    blind = [node["address"] for node in nodes if not node["sees_data_dir"]]
    if blind:
        return Finding(
            "missing",
            f"{asked.data_dir} is not seen by {', '.join(blind)}",
            "mount one file system there on every node, or choose --data-dir on one",
        )
    return Finding("ok", f"{asked.data_dir} is seen by {len(nodes)} nodes")


def _unasked(facts: Facts) -> Finding:
    return Finding("ok", facts["ray"].get("skipped", "Ray does not run"))


def _transformer_engine(asked: Asked, facts: Facts) -> Finding:
    found = _imported("transformer-engine", "cuda")(asked, facts)
    if found.status == "missing" and not asked.needs_gpus:
        return Finding("ok", "not used on CPUs")
    return found


def _sglang(asked: Asked, facts: Facts) -> Finding:
    answer = facts["sglang"]
    if "error" in answer:
        advice = remedy("sglang") + ", or name its command with cluster.sglang_command"
        return Finding("missing", answer["error"], advice)
    wrong = misfit("sglang", answer["version"], "sglang")
    found = f"{answer['version']} with Python {answer['python']}, torch {answer['torch']}"
    return Finding("warning" if wrong else "ok", wrong or found, remedy("sglang") if wrong else "")


def _kernels(asked: Asked, facts: Facts) -> Finding:
    answer = facts["sglang"]
    if "error" in answer:
        return Finding("missing", "SGLang itself is missing", remedy("sglang"))
    if "kernels_error" in answer:
        status = "missing" if asked.needs_gpus else "warning"
        return Finding(status, answer["kernels_error"], "pip install sglang-kernel, for its torch")
    return Finding("ok", str(answer["kernels"]))


def _memory_saver(asked: Asked, facts: Facts) -> Finding:
    here, there = facts["torch-memory-saver"], facts["sglang"].get("torch_memory_saver")
    if "error" not in here and there:
        return Finding("ok", f"{here['version']} here, {there} with SGLang")
    where = "in SGLang's Python" if "error" not in here else "here"
    return Finding(
        "warning",
        f"not {where}",
        "trainer and engines cannot give way to each other on one GPU: place them apart "
        f"(rollout GPUs of their own), or {remedy('cuda')}",
    )


def _disk(asked: Asked, facts: Facts) -> Finding:
    answer = facts["host"]
    if not answer.get("writable"):
        return Finding("missing", f"{asked.data_dir} cannot be written", "choose another data_dir")
    free_bytes = answer["disk_free_bytes"]
    found = f"{free_bytes / GIB:.0f} GiB free in {asked.data_dir}"
    if free_bytes < MIN_DISK_BYTES:
        return Finding("warning", found, "checkpoints need about 14 bytes a trained parameter")
    return Finding("ok", found)


def _port(asked: Asked, facts: Facts) -> Finding:
    where = f"{asked.host} port {asked.port}"
    error = facts["host"].get("port_error")
    if error:
        return Finding("missing", f"{where}: {error}", "stop what listens there, or choose --port")
    return Finding("ok", f"{where} is free")


def _open_files(asked: Asked, facts: Facts) -> Finding:
    limit = facts["host"].get("open_files", 0)
    if 0 <= limit < MIN_OPEN_FILES:
        return Finding("warning", f"at most {limit}", f"raise the hard limit to {MIN_OPEN_FILES}")
    return Finding("ok", "unlimited" if limit < 0 else f"at most {limit}")


def _memlock(asked: Asked, facts: Facts) -> Finding:
    limit = facts["host"].get("memlock_bytes", 0)
    if limit >= 0:
        return Finding(
            "warning" if asked.needs_gpus and asked.backend == "cluster" else "ok",
            f"at most {limit // 1024} KiB",
            "InfiniBand needs `ulimit -l unlimited`",
        )
    return Finding("ok", "unlimited")


def _shm(asked: Asked, facts: Facts) -> Finding:
    size = facts["host"].get("shm_bytes", 0)
    found = f"{size / GIB:.1f} GiB"
    if size < MIN_SHM_BYTES and asked.backend == "cluster":
        return Finding("warning", found, "in a container: --shm-size 16g, or --ipc host")
    return Finding("ok", found)


_SERVER = tuple(requirements("server"))

CHECKS: tuple[Check, ...] = (
    Check("Python", "runs everything", ALL, _python),
    Check("server packages", "HTTP, storage", ALL, _extra("server")),
    Check("torch", "computes", TORCH, _torch),
    Check("weights' packages", "read models", TORCH, _extra("embedded", "torch", *_SERVER)),
    Check("NVIDIA driver", "GPUs of this machine", CLUSTER, _driver),
    Check("GPUs", "train and sample", CLUSTER, _gpus),
    Check("peer access", "GPUs of a machine exchange without the host", OPTIONAL, _peers),
    Check("NCCL", "GPUs exchange across machines", CLUSTER, _nccl),
    Check("network", "interfaces that NCCL chooses from", OPTIONAL, _network),
    Check("Ray", "places and starts ranks and engines", CLUSTER, _ray),
    Check("Ray's nodes", "the machines of the cluster", CLUSTER, _nodes),
    Check("same versions", "what one node pickles another must read", CLUSTER, _same_versions),
    Check("shared data", "every rank writes checkpoints into data_dir", CLUSTER, _shared),
    Check("Megatron-core", "trains", CLUSTER, _imported("megatron-core", "cluster")),
    Check("Transformer Engine", "layers on GPUs", CLUSTER, _transformer_engine),
    Check("Apex", "fused kernels", OPTIONAL, _imported("apex", "", "Not needed.")),
    Check(
        "flash-attn",
        "attention that Transformer Engine may choose",
        OPTIONAL,
        _imported("flash-attn", "", "Not needed: Transformer Engine has cuDNN's."),
    ),
    Check("SGLang", "samples", CLUSTER, _sglang),
    Check("SGLang's kernels", "samples on GPUs", CLUSTER, _kernels),
    Check("SGLang's router", "spreads samples", CLUSTER, _imported("sglang-router", "cluster")),
    Check("torch_memory_saver", "trainer and engines share GPUs in turn", OPTIONAL, _memory_saver),
    Check("disk", "models, checkpoints, versions", ALL, _disk),
    Check("port", "the API", ALL, _port),
    Check("open files", "a connection for each poll", OPTIONAL, _open_files),
    Check("locked memory", "remote memory access", OPTIONAL, _memlock),
    Check("shared memory", "Ray's objects, NCCL between processes", OPTIONAL, _shm),
)
