"""Sequences of random tokens in blocks, ready for their next one: what runners are compared on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tinkercloud.architectures import load_architecture
from tinkercloud.architectures.config import ArchitectureConfig, from_hf
from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner, TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.weights.adapters import fresh_adapter

FAMILIES = ("Llama", "Qwen2", "Qwen3")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 640,
}


def tiny_config(family: str, **changes: object) -> ArchitectureConfig:
    return from_hf({"architectures": [f"{family}ForCausalLM"], **SIZES, **changes})


def random_base(
    config: ArchitectureConfig, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> BaseModel:
    """Weights large enough that every part shows in the logits; the same on every device. They are
    tensors, as PyTorch reads them."""
    generator, place, weights = torch.Generator().manual_seed(5), torch.device(device), {}
    for name, shape in config.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        scale = 1.3 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        weights[name] = (noise * scale + ("norm" in name)).to(place, dtype)
    weights.setdefault("lm_head", weights["model.embed_tokens"])
    network = load_architecture(config.name)(config, place)
    return BaseModel("tiny", config, network, weights, None, dtype, place)


def with_weights(base: BaseModel, weights: Mapping[str, Tensor]) -> BaseModel:
    """The same network with these, as a model that is served holds them."""
    served = BaseModel.of(base.name, base.config, weights.items(), base.dtype, base.device)
    return replace(served, decoder=base.decoder)


def version(base: BaseModel, rank: int | None, seed: int, unembed: bool = True) -> Version:
    """rank None: the base itself. The adapter's B is not zero, so that it shows."""
    if rank is None:
        return Version("base", base, base.weights, None, 1.0)
    spec = LoraSpec(rank=rank, seed=seed, train_unembed=unembed)
    adapter = fresh_adapter(spec, base.config.linear_shapes(), base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.values():
        b += 0.3 * torch.randn(b.shape, generator=generator).to(b.device)
    return Version(f"v{seed}-{rank}", base, base.weights, adapter, 1.0 + 0.5 * seed)


@dataclass
class Scene:
    """Sequences with everything but their last token done. tables (S, blocks). tokens: of each
    sequence so far."""

    base: BaseModel
    pool: BlockPool
    versions: list[tuple[Version, int]]
    lengths: np.ndarray
    tables: np.ndarray
    generator: np.random.Generator
    tokens: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        versions: Sequence[tuple[Version, int]],
        lengths: Sequence[int],
        num_blocks: int = 200,
        seed: int = 0,
    ) -> "Scene":
        """versions: with how many sequences each. lengths: tokens in blocks, at least 1 each."""
        base, generator = versions[0][0].base, np.random.default_rng(seed)
        pool = BlockPool(base.config, base.dtype, base.device, num_blocks)
        widest = blocks_for(base.config.max_position_embeddings)
        tables = np.zeros((len(lengths), widest), np.int32)
        for row, length in enumerate(lengths):
            taken = pool.allocate(blocks_for(length + 2 * BLOCK_TOKENS))
            assert taken is not None
            tables[row, : len(taken)] = taken
        scene = cls(base, pool, list(versions), np.array(lengths), tables, generator)
        scene._prefill()
        return scene

    def _prefill(self) -> None:
        counts = self.lengths
        sequence = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
        tokens = self.generator.integers(0, self.base.config.vocab_size, len(positions))
        self.tokens = [part.tolist() for part in np.split(tokens, np.cumsum(counts)[:-1])]
        ends = np.cumsum([0, *(n for _, n in self.versions)])
        rows = [int(counts[a:b].sum()) for a, b in pairwise(ends)]
        versions = [(v, n) for (v, _), n in zip(self.versions, rows, strict=True)]
        wanted = np.array([len(tokens) - 1])
        batch = Batch(tokens, positions, sequence, self.tables, versions, wanted)
        with torch.inference_mode():
            TorchRunner().forward(batch, self.pool)

    def next_batch(self) -> Batch:
        """One more token for each; the sequences are that much longer after."""
        size = len(self.lengths)
        tokens = self.generator.integers(0, self.base.config.vocab_size, size)
        for sequence, token in zip(self.tokens, tokens.tolist(), strict=True):
            sequence.append(token)
        rows = np.arange(size, dtype=np.int32)
        positions = self.lengths.astype(np.int32)
        widest = blocks_for(int(positions.max()) + 1)
        self.lengths = self.lengths + 1
        tables = self.tables[:, :widest]
        return Batch(tokens, positions, rows, tables, self.versions, np.arange(size))

    def held(self) -> list[Tensor]:
        """Keys and values of the sequences' blocks, layer by layer."""
        blocks = torch.from_numpy(np.unique(self.tables)).to(self.base.device)
        return [tensor[blocks.long()] for tensor in (*self.pool.keys, *self.pool.values)]


def steps(scene: Scene, runner: Runner, count: int) -> list[Tensor]:
    """Logits of so many steps, on the CPU."""
    with torch.inference_mode():
        found = [runner.forward(scene.next_batch(), scene.pool) for _ in range(count)]
    return [logits.float().cpu() for logits in found]


class Traced:
    """Captures the operations of a step, and refuses those that wait for the device."""

    FORBIDDEN = ("_local_scalar_dense", "aten.nonzero", "aten.item", "aten.masked_select")

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def body(unused: torch.Tensor) -> torch.Tensor:
            work()
            return unused

        graph = make_fx(body)(torch.zeros(1))
        names = [str(node.target) for node in graph.graph.nodes]
        assert not [n for n in names if any(bad in n for bad in self.FORBIDDEN)]
        return lambda: graph(torch.zeros(1))
