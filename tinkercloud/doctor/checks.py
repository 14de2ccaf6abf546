"""The doctor's tables: every check, and which of them the short report of a backend shows."""

from dataclasses import dataclass

from tinkercloud.doctor import cluster_checks as cluster
from tinkercloud.doctor import embedded_checks as embedded
from tinkercloud.doctor import machine_checks as machine
from tinkercloud.doctor import software_checks as software
from tinkercloud.doctor.finding import Check
from tinkercloud.doctor.requirements import requirements

ALL = ("embedded", "cluster", "fake")
TORCH = ("embedded", "cluster")
EMBEDDED = ("embedded",)
CLUSTER = ("cluster",)
OPTIONAL = ()

_SERVER = tuple(requirements("server"))
_weights_packages = software.extra("embedded", "torch", *_SERVER)
_megatron = software.imported("megatron-core", "cluster")
_apex = software.imported("apex", "", "Not needed.")
_flash = software.imported("flash-attn", "", "Not needed: Transformer Engine has cuDNN's.")
_router = software.imported("sglang-router", "cluster")

# Name, what having it means, the backends that need it, the facts it reads, how it judges them.
CHECKS: tuple[Check, ...] = tuple(
    Check(name, purpose, needed_by, tuple(reads.split()), look)
    for name, purpose, needed_by, reads, look in (
        ("Python", "runs everything", ALL, "python", software.python),
        ("server packages", "HTTP, storage", ALL, "versions", software.extra("server")),
        ("torch", "computes", TORCH, "torch driver", software.torch),
        ("weights' packages", "read models", TORCH, "versions", _weights_packages),
        ("grammars", "JSON schemas of samples", OPTIONAL, "versions", software.extra("grammar")),
        ("device", "the embedded engine computes on it", EMBEDDED, "engine torch", embedded.device),
        ("processor", "vector instructions", OPTIONAL, "host engine", embedded.processor),
        ("number type", "of the base weights", OPTIONAL, "engine", embedded.number_type),
        ("kernels", "faster than PyTorch's operations", OPTIONAL, "engine", embedded.kernels),
        (
            "exactness",
            "log-probabilities in training equal the sampled ones",
            OPTIONAL,
            "deviation torch",
            embedded.exactness,
        ),
        ("products", "PyTorch's: to the bit in any batch", OPTIONAL, "engine", embedded.products),
        ("memory", "weights and caches", OPTIONAL, "host engine models", embedded.memory),
        ("models", "served at the start", TORCH, "models", embedded.models),
        ("NVIDIA driver", "GPUs of this machine", CLUSTER, "driver", machine.driver),
        ("GPUs", "train and sample", CLUSTER, "torch ray", machine.gpus),
        ("peer access", "GPUs exchange without the host", OPTIONAL, "torch", machine.peers),
        ("NCCL", "GPUs exchange across machines", CLUSTER, "torch", machine.nccl),
        ("network", "interfaces that NCCL chooses from", OPTIONAL, "host", machine.network),
        ("Ray", "places and starts ranks and engines", CLUSTER, "ray", cluster.ray),
        ("Ray's nodes", "the machines of the cluster", CLUSTER, "ray", cluster.nodes),
        (
            "same versions",
            "nodes exchange pickles",
            CLUSTER,
            "ray",
            cluster.same_versions,
        ),
        ("shared data", "ranks write checkpoints there", CLUSTER, "ray", cluster.shared_data),
        ("Megatron-core", "trains", CLUSTER, "megatron-core", _megatron),
        (
            "Transformer Engine",
            *("layers on GPUs", CLUSTER, "transformer-engine", cluster.transformer_engine),
        ),
        ("Apex", "fused kernels", OPTIONAL, "apex", _apex),
        ("flash-attn", "attention of Transformer Engine's choice", OPTIONAL, "flash-attn", _flash),
        ("SGLang", "samples", CLUSTER, "sglang", cluster.sglang),
        ("SGLang's kernels", "samples on GPUs", CLUSTER, "sglang", cluster.kernels),
        ("SGLang's router", "spreads samples", CLUSTER, "sglang-router", _router),
        (
            "torch_memory_saver",
            *("trainer and engines share GPUs in turn", OPTIONAL),
            *("torch-memory-saver sglang", cluster.memory_saver),
        ),
        ("disk", "models, checkpoints, versions", ALL, "host", machine.disk),
        ("port", "the API", ALL, "host", machine.port),
        ("open files", "a connection for each poll", OPTIONAL, "host", machine.open_files),
        ("locked memory", "remote memory access", OPTIONAL, "host", machine.locked_memory),
        ("shared memory", "Ray's objects, NCCL's buffers", OPTIONAL, "host", machine.shared_memory),
    )
)
BY_NAME = {check.name: check for check in CHECKS}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the short report: several checks, the facts of which it joins."""

    name: str
    checks: tuple[str, ...]


_SOFTWARE = ("Python", "server packages", "torch", "weights' packages")

# All that a backend needs is in its rows: the exit status is the same with and without --all.
ROWS: dict[str, tuple[Row, ...]] = {
    "embedded": (
        Row("software", _SOFTWARE),
        Row("device", ("device",)),
        Row("numbers", ("number type", "processor")),
        Row("kernels", ("kernels", "exactness")),
        Row("memory", ("memory",)),
        Row("models", ("models",)),
        Row("data", ("disk",)),
        Row("address", ("port",)),
    ),
    "cluster": (
        Row("software", _SOFTWARE),
        Row("GPUs", ("GPUs", "NVIDIA driver", "peer access", "NCCL")),
        Row("Ray", ("Ray", "Ray's nodes", "same versions")),
        Row("training", ("Megatron-core", "Transformer Engine")),
        Row("sampling", ("SGLang", "SGLang's kernels", "SGLang's router", "torch_memory_saver")),
        Row("network", ("network", "shared memory", "locked memory")),
        Row("models", ("models",)),
        Row("data", ("disk", "shared data")),
        Row("address", ("port",)),
    ),
    "fake": (
        Row("software", ("Python", "server packages")),
        Row("data", ("disk",)),
        Row("address", ("port",)),
    ),
}
