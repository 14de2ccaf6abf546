"""Facts as probes of some machines would answer them."""

from tinkercloud.doctor import requirements
from tinkercloud.doctor.finding import GIB

GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "free_bytes": 79 * GIB,
    "total_bytes": 80 * GIB,
}
NO_MODULE = {"error": "ModuleNotFoundError: No module named 'x'"}


def node(address: str, **changes) -> dict:
    versions = {"torch": "2.13.0", "ray": "2.60.0"}
    sees = {"python": "3.11.7", "versions": versions, "sees_data_dir": True, "shm_bytes": GIB}
    return {"address": address, "cpus": 96, "gpus": 8, "object_store_bytes": GIB, **sees, **changes}


def ray(*nodes: dict, version: str = "2.60.0") -> dict:
    return {"version": version, "access": "with a token of its own", "nodes": list(nodes)}


def healthy_facts() -> dict[str, dict]:
    """Of a good machine with eight GPUs."""
    return {
        "python": {"version": "3.11.7", "executable": "/usr/bin/python"},
        "versions": {
            name: next(iter(requirement.specifier)).version
            for extra in ("embedded", "grammar")
            for name, requirement in requirements.requirements(extra).items()
        },
        "host": {
            "disk_free_bytes": 900 * GIB,
            "writable": True,
            "shm_bytes": 64 * GIB,
            "open_files": 1048576,
            "memlock_bytes": -1,
            "interfaces": ["eth0"],
            "port_error": "",
            "processor": {"model": "a processor", "instructions": ["AVX2", "AVX-512"]},
            "memory": {"total_bytes": 512 * GIB, "free_bytes": 400 * GIB},
        },
        "driver": {"version": "580.10", "gpus": ["580.10, NVIDIA H100"] * 8},
        "torch": {
            "version": "2.13.0+cu130",
            "cuda": "13.0",
            "gpus": [GPU] * 8,
            "no_peer_access": [],
            "nccl": "2.30.7",
        },
        "engine": {
            "device": "cuda",
            "gpu": GPU,
            "cores": 96,
            "dtype": "bfloat16",
            "best_dtype": "bfloat16",
            "kernels": "Triton",
            "kernels_error": "",
            "compiler": "/usr/bin/cc",
        },
        "deviation": {"promised": False, "tokens": 240, "largest": 0.03},
        "models": {"Qwen/Qwen3-8B": {"architecture": "qwen3", "parameters": 8_190_735_360}},
        "ray": ray(node("10.0.0.1"), node("10.0.0.2")),
        "sglang": {
            "version": "0.5.23",
            "python": "3.11.7",
            "torch": "2.13.0+cu130",
            "torch_memory_saver": "0.0.10",
            "kernels": "0.4.10",
            "speculative": ["EAGLE3", "NGRAM"],
        },
        "megatron-core": {"version": "0.16.1"},
        "transformer-engine": {"version": "2.11.0"},
        "torch-memory-saver": {"version": "0.0.10"},
        "sglang-router": {"version": "0.3.2"},
        "apex": {"version": "0.1"},
        "flash-attn": {"version": "2.8.3"},
    }


def laptop_facts() -> dict[str, dict]:
    """Of a laptop without a GPU, with what the embedded backend needs."""
    facts = healthy_facts() | dict.fromkeys(
        ("driver", "sglang", "megatron-core", "transformer-engine", "torch-memory-saver"), NO_MODULE
    )
    facts["torch"] = {"version": "2.13.0+cpu", "cuda": None, "gpus": []}
    facts["engine"] |= {"device": "cpu", "cores": 8, "dtype": "float32", "best_dtype": "float32"}
    facts["engine"] |= {
        "kernels": "C",
        "instruction_set": "avx512",
        "row_invariant": {"float32": True},
    }
    facts["deviation"] |= {"promised": True, "largest": 0.0}
    facts["host"] |= {"memory": {"total_bytes": 16 * GIB, "free_bytes": 8 * GIB}}
    facts["models"] = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": {"architecture": "llama", "parameters": 134515008}
    }
    return facts | {"ray": {"skipped": "not tried for the backend embedded"}}


def without_torch(facts: dict[str, dict]) -> dict[str, dict]:
    """The same where only the extra `server` is installed."""
    versions = facts["versions"] | dict.fromkeys(("torch", "gguf", "safetensors"))
    missing = {"error": "ModuleNotFoundError: No module named 'torch'"}
    models = {name: {"architecture": "GGUF"} for name in facts["models"]}
    without = dict.fromkeys(("torch", "engine", "deviation"), missing)
    return facts | without | {"versions": versions, "models": models}
