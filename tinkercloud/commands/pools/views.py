"""What `pool plan` and `pool inspect` show."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tinkercloud.errors import ConfigError
from tinkercloud.pool.layer_plan import Device, plan_layers
from tinkercloud.pool.model_file import model_parts, read_model_file
from tinkercloud.pool.pool_file import PoolFile, load_pool
from tinkercloud.pool.sizes import size_text
from tinkercloud.weights.gguf_file import GGUFFile


def planned_lines(pool_path: Path, model_name: str | None) -> Iterator[str]:
    """Raises ConfigError, also where a worker's memory is not in the YAML: then it is known only
    when the pool starts."""
    pool = load_pool(pool_path)
    model = pool.model(model_name)
    file = read_model_file(model.path)
    plan = plan_layers(file, model, _stated_devices(pool), pool.coordinator.reserve)
    yield f"{model.name}: {file.num_layers} layers, {size_text(file.num_bytes)} of weights"
    yield from plan.lines()


def _stated_devices(pool: PoolFile) -> list[Device]:
    devices = list[Device]()
    if pool.coordinator.memory:
        devices.append(Device("coordinator", "CPU", pool.coordinator.memory))
    owners = [(worker.name, worker.gpus) for worker in pool.workers]
    for owner, gpus in [*owners, ("coordinator", pool.coordinator.gpus)]:
        for gpu in gpus:
            if gpu.memory is None:
                raise ConfigError(
                    f"the YAML does not say how much memory {owner}/{gpu.device} lends; write "
                    "memory: 8GiB there, or start the pool, which asks the worker"
                )
            devices.append(Device(owner, gpu.device, gpu.memory))
    return devices


def model_lines(path: Path, context: int, with_tensors: bool) -> Iterator[str]:
    """Raises ConfigError."""
    file = read_model_file(path)
    parts = model_parts(path)
    yield f"{file.name} ({file.architecture}), {size_text(file.num_bytes)} in {len(parts)} file(s)"
    kinds = ", ".join(f"{kind} {size_text(n)}" for kind, n in file.quantizations.items())
    yield f"  weights        {kinds}"
    yield f"  layers         {file.num_layers} of {_span(file.layer_bytes)}"
    yield f"  embedding      {size_text(file.input_bytes)}, on the coordinator"
    yield f"  output         {size_text(file.output_bytes)}, vocabulary {file.vocabulary:,}"
    for kind in ("f16", "q8_0", "q4_0"):
        num_bytes = sum(file.cache_bytes(n, context, kind) for n in range(file.num_layers))
        yield f"  cache {kind:8} {size_text(num_bytes)} for {context:,} tokens"
    yield f"  trained for    {file.trained_context:,} tokens"
    yield "layers:"
    for layer, num_bytes in enumerate(file.layer_bytes):
        cache = file.cache_bytes(layer, context, "f16")
        yield f"  {layer:>4}  {size_text(num_bytes):>10} weights  {size_text(cache):>10} cache"
    if with_tensors:
        yield "tensors:"
        for part in parts:
            for name, entry in GGUFFile(part).tensors.items():
                shape = "x".join(map(str, entry.shape))
                yield f"  {name:32} {shape:>16} {entry.kind.name:6} {size_text(entry.num_bytes)}"


def _span(sizes: Sequence[int]) -> str:
    low, high = size_text(min(sizes)), size_text(max(sizes))
    return low if low == high else f"{low} to {high}"
