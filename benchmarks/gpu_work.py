"""What benchmarks/gpu.py runs: networks of random weights, growing sequences, training calls."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tinkercloud.architectures.config import ArchitectureConfig, from_hf
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, SamplingParams, TrainBatch
from tinkercloud.decoding import device_scan
from tinkercloud.decoding.sampler import RowParams, sample
from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.decode_graphs import CudaCapture, DrawGraphs
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import GraphRunner, Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import train_alone
from tinkercloud.embedded.training.trainable_model import TrainableModel
from tinkercloud.weights.adapters import fresh_adapter

RANK = 32


@dataclass(frozen=True)
class Trained:
    """step_s: the shortest. peak_bytes: allocated on the device in a step, without the base's
    weights. loss: of the first step, summed over tokens."""

    variant: str
    step_s: float
    peak_bytes: int
    loss: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> ArchitectureConfig:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    shared = {"vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960}
    return from_hf(
        {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tied}
        | sizes
        | heads_of
        | shared
    )


SHAPES = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 12288, tied=False),
}
TINY = {
    "tiny": replace(
        SHAPES["Qwen3-0.6B"], hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, vocab_size=300, max_position_embeddings=1024,
    )
}  # fmt: skip


def random_base(
    name: str, config: ArchitectureConfig, dtype: torch.dtype, device: torch.device
) -> BaseModel:
    torch.manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for path, shape in config.weight_shapes().items():
        if len(shape) > 1:
            weights[path] = torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)
        else:
            weights[path] = torch.ones(shape, dtype=dtype, device=device)
    return BaseModel.of(name, config, weights.items(), dtype, device)


def version(base: BaseModel, *, adapter: bool) -> Version:
    if not adapter:
        return Version("base", base, base.weights, None, 1.0)
    factors = fresh_adapter(LoraSpec(rank=RANK, seed=1), base.config.linear_shapes(), base.device)
    for _, b in factors.values():
        b.normal_(0, 0.01)
    return Version("adapted", base, base.weights, factors, 1.0)


def graph_runner(device: torch.device) -> GraphRunner:
    capture = CudaCapture() if device.type == "cuda" else None
    return GraphRunner(capture, DrawGraphs(capture))


class Decoding:
    """Sequences of random keys and values that grow by a token a step."""

    def __init__(
        self, version: Version, runner: Runner, num_seqs: int, context: int, num_steps: int
    ):
        base, num_blocks = version.base, blocks_for(context + num_steps)
        self.runner, self._version, self._num_seqs = runner, version, num_seqs
        self._pool = BlockPool(base.config, base.dtype, base.device, num_seqs * num_blocks + 1)
        for tensor in (*self._pool.keys, *self._pool.values):
            tensor.normal_(generator=torch.Generator(base.device).manual_seed(2))
        blocks = self._pool.allocate(num_seqs * num_blocks)
        assert blocks is not None
        self._tables = np.array(blocks, np.int32).reshape(num_seqs, num_blocks)
        self._tokens, self._at = np.arange(num_seqs, dtype=np.int64), context
        self.forward_s = 0.0

    def logits(self) -> torch.Tensor:
        rows, self._at = np.arange(self._num_seqs), self._at + 1
        positions = np.full(len(rows), self._at - 1, np.int32)
        tables = self._tables[:, : blocks_for(self._at)]
        sequence = rows.astype(np.int32)
        versions = [(self._version, len(rows))]
        batch = Batch(self._tokens, positions, sequence, tables, versions, rows)
        return self.runner.forward(batch, self._pool)

    @torch.inference_mode()
    def step(self) -> None:
        start = time.perf_counter()
        logits = self.logits()
        synchronize(logits.device)
        self.forward_s += time.perf_counter() - start
        params = [RowParams(SamplingParams(None, i), 0, self._at) for i in range(self._num_seqs)]
        drawn = sample(logits, params, self.runner.scan or device_scan.scan)
        self._tokens = drawn.tokens.numpy()


@torch.inference_mode()
def decoded(base: BaseModel, tokens: np.ndarray) -> torch.Tensor:
    """Logits (V,) after all tokens: a prompt, then the last one as a decode step."""
    pool = BlockPool(base.config, base.dtype, base.device, blocks_for(len(tokens)) + 1)
    tables = np.array([pool.allocate(blocks_for(len(tokens)))], np.int32)
    runner, plain = graph_runner(base.device), version(base, adapter=False)
    for rows in (np.arange(len(tokens) - 1), np.array([len(tokens) - 1])):
        zeros, last = np.zeros(len(rows), np.int32), np.array([len(rows) - 1])
        positions, versions_of = rows.astype(np.int32), [(plain, len(rows))]
        batch = Batch(tokens[rows], positions, zeros, tables, versions_of, last)
        logits = runner.forward(batch, pool)
    return logits[0]


def step_bytes(version: Version, num_seqs: int, context: int) -> int:
    """What a step must read at least: every matrix once, the keys and values of every sequence."""
    base, config = version.base, version.base.config
    matrices = sum(base.weights[name].nbytes for name in config.linear_shapes())
    if version.adapter is not None:
        matrices += sum(a.nbytes + b.nbytes for a, b in version.adapter.values())
    per_token = BlockPool.bytes_per_block(config, base.dtype) // BLOCK_TOKENS
    return matrices + num_seqs * context * per_token


def train_call(base: BaseModel, rows: Sequence[np.ndarray], num_steps: int = 1) -> Trained:
    """forward_backward with a fresh adapter and an optimizer step, so many times."""
    spec, before = LoraSpec(rank=RANK, seed=3), allocated_bytes(base.device)
    adapter = fresh_adapter(spec, base.config.linear_shapes(), base.device)
    model = TrainableModel("m", base, spec, adapter, None)
    data = tuple(datum(row) for row in rows)
    tokens = sum(len(d.tokens) for d in data)
    memory = 2**33
    if base.device.type == "cuda":
        memory = torch.cuda.mem_get_info()[0] // 2
    losses, taken = [], []
    for _ in range(num_steps):
        synchronize(base.device)
        start = time.perf_counter()
        batch = TrainBatch(data, "cross_entropy")
        output = train_alone(model, batch, Limits(tokens, memory))
        losses.append(float(output.metrics["loss:sum"]))
        model.optim_step(AdamParams(learning_rate=1e-4))
        synchronize(base.device)
        taken.append(time.perf_counter() - start)
    return Trained("tinkercloud", min(taken), peak_bytes(base.device) - before, losses[0])


def allocated_bytes(device: torch.device) -> int:
    """Now; the peak begins anew. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def datum(tokens: np.ndarray) -> Datum:
    weights = np.ones(len(tokens) - 1, np.float32)
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": weights}
    return Datum(tokens[:-1].astype(np.int32), inputs)


def flop_per_token(config: ArchitectureConfig) -> int:
    """4 for each frozen weight, 6 for each of the adapter; nothing for attention or what is
    computed twice."""
    shapes = config.linear_shapes().values()
    return sum(4 * out * inner + 6 * RANK * (out + inner) for out, inner in shapes)
