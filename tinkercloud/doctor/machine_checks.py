"""Checks of the machine: GPUs, network, disk, limits."""

from tinkercloud.doctor.finding import GIB, Facts, Finding
from tinkercloud.doctor.target import Target

MIN_DISK_BYTES = 20 * GIB
MIN_SHM_BYTES = 8 * GIB
MIN_OPEN_FILES = 65536
MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores


def gpus_of(target: Target, facts: Facts) -> int:
    """GPUs that the cluster backend could use: those of Ray's nodes, else this machine's."""
    if target.ray_address:
        return int(sum(node["gpus"] for node in facts["ray"].get("nodes", [])))
    return len(facts["torch"].get("gpus", []))


def driver(target: Target, facts: Facts) -> Finding:
    answer = facts["driver"]
    if "error" not in answer:
        fact = f"{answer['version']}, {len(answer['gpus'])} GPUs"
        return Finding("ok", fact, brief=f"driver {answer['version']}")
    if not target.needs_gpus or target.ray_address or target.backend != "cluster":
        advice = "nothing, unless it should have GPUs"
        return Finding("warning", "none on this machine", advice, brief="")
    advice = "install NVIDIA's driver; `nvidia-smi` must run"
    return Finding("missing", answer["error"], advice, "no NVIDIA driver")


def gpus(target: Target, facts: Facts) -> Finding:
    devices = facts["torch"].get("gpus", [])
    if devices:
        return _devices(devices)
    if not target.needs_gpus:
        return Finding("ok", "none, and none is asked for (cluster.device cpu)")
    elsewhere = gpus_of(target, facts)
    if elsewhere:
        return Finding("ok", f"none here; {elsewhere} on Ray's nodes")
    return Finding("missing", "none", "the cluster trains on GPUs; `embedded` needs none", "no GPU")


def _devices(devices: list[dict]) -> Finding:
    names = sorted({gpu["name"] for gpu in devices})
    smallest = min(gpu["total_bytes"] for gpu in devices) / GIB
    lowest = min(tuple(gpu["capability"]) for gpu in devices)
    brief = f"{len(devices)} x {', '.join(names)}, {smallest:.0f} GiB"
    fact = f"{brief}, capability {'.'.join(map(str, lowest))}"
    if lowest < MIN_CAPABILITY:
        return Finding("warning", fact, "bfloat16 needs capability 8.0; use --dtype float32")
    if len(names) > 1:
        advice = "GPUs differ: plans follow the smallest, steps the slowest"
        return Finding("warning", fact, advice)
    return Finding("ok", fact, brief=brief)


def peers(target: Target, facts: Facts) -> Finding:
    answer = facts["torch"]
    if len(answer.get("gpus", [])) < 2:
        return Finding("ok", "fewer than two GPUs here", brief="")
    blocked = answer.get("no_peer_access", [])
    if blocked:
        return Finding(
            "warning",
            f"{len(blocked)} pairs of GPUs cannot read each other's memory",
            "weights go through the host; check IOMMU/ACS settings and `nvidia-smi topo -p2p r`",
        )
    return Finding("ok", "every GPU reads every other's memory", brief="")


def nccl(target: Target, facts: Facts) -> Finding:
    version = facts["torch"].get("nccl")
    shown = "".join(f", {key}={value}" for key, value in sorted(target.variables.items()))
    if version is None:
        if not target.needs_gpus or not facts["torch"].get("gpus"):
            return Finding("ok", f"not used on this machine{shown}", brief="")
        return Finding("missing", "torch has none", "install a CUDA build of torch", "no NCCL")
    return Finding("ok", f"{version}{shown}", brief=f"NCCL {version}")


def network(target: Target, facts: Facts) -> Finding:
    up = facts["host"].get("interfaces", [])
    setting = target.variables.get("NCCL_SOCKET_IFNAME", "")
    named = [name for name in setting.lstrip("=^").split(",") if name]
    # NCCL takes prefixes; "^" excludes what follows.
    if named and not setting.startswith("^"):
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
            f"several interfaces: {', '.join(up)}",
        )
    return Finding("ok", ", ".join(up) or "loopback only")


def disk(target: Target, facts: Facts) -> Finding:
    answer = facts["host"]
    if not answer.get("writable"):
        fact = f"{target.data_dir} cannot be written"
        return Finding("missing", fact, "choose another folder with --data-dir")
    free_bytes = answer["disk_free_bytes"]
    fact = f"{free_bytes / GIB:.0f} GiB free in {target.data_dir}"
    if free_bytes < MIN_DISK_BYTES:
        return Finding("warning", fact, "checkpoints need about 14 bytes a trained parameter")
    return Finding("ok", fact)


def port(target: Target, facts: Facts) -> Finding:
    where = f"{target.host} port {target.port}"
    error = facts["host"].get("port_error")
    if error:
        return Finding("missing", f"{where}: {error}", "stop what listens there, or choose --port")
    return Finding("ok", f"{where} is free")


def open_files(target: Target, facts: Facts) -> Finding:
    limit = facts["host"].get("open_files", 0)
    if 0 <= limit < MIN_OPEN_FILES:
        return Finding("warning", f"at most {limit}", f"raise the hard limit to {MIN_OPEN_FILES}")
    return Finding("ok", "unlimited" if limit < 0 else f"at most {limit}")


def locked_memory(target: Target, facts: Facts) -> Finding:
    limit = facts["host"].get("memlock_bytes", 0)
    if limit >= 0:
        return Finding(
            "warning" if target.needs_gpus and target.backend == "cluster" else "ok",
            f"at most {limit // 1024} KiB",
            "InfiniBand needs `ulimit -l unlimited`",
            f"locked memory at most {limit // 1024} KiB",
        )
    return Finding("ok", "unlimited", brief="")


def shared_memory(target: Target, facts: Facts) -> Finding:
    size = facts["host"].get("shm_bytes", 0)
    fact = f"{size / GIB:.1f} GiB"
    brief = f"{fact} of shared memory"
    if size < MIN_SHM_BYTES and target.backend == "cluster":
        advice = "in a container: --shm-size 16g, or --ipc host"
        return Finding("warning", fact, advice, brief)
    return Finding("ok", fact, brief=brief)
