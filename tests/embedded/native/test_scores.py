"""Log-probabilities of targets that a pass computes without keeping logits, against those of the
logits themselves: bit for bit."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tinkercloud.architectures.config import ArchitectureConfig, from_hf
from tinkercloud.embedded.forward.kv_blocks import BlockPool, kv_layout_of
from tinkercloud.embedded.native import compiler
from tinkercloud.embedded.native.bindings import AdapterTable, NativeModel, log_sum_exp
from tinkercloud.embedded.native.layered_pass import LayeredPass, Rows
from tinkercloud.embedded.native.packed import PackedWeights, pack, packed_shape
from tinkercloud.embedded.native.scores import Targets
from tinkercloud.embedded.native.team import Team
from tinkercloud.embedded.native.train_bindings import training_team

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="there is no C compiler")

HIDDEN, NUM_ROWS = 70, 300
SIZES = (1, 16, 1000, 1024, 1025, 3003)


class Unembedding:
    """The end of a pass over NUM_ROWS rows, which are its hidden states."""

    def __init__(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        adapted: Sequence[tuple[int, int]],
        logit_cap: float = 0.0,
    ):
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(vocab_size)
        config = replace(tiny_config(vocab_size), logit_cap=logit_cap)
        with training_team() as team:
            weights = self.weights(team, config, dtype)
            tables = [AdapterTable(team, self.adapter(), 1) for _ in adapted]
        pool = BlockPool(config, dtype, torch.device("cpu"), 1, kv_layout_of(dtype))
        model = NativeModel(config, weights, pool.keys, pool.values)
        rows = Rows(
            np.zeros(NUM_ROWS, np.int64),
            np.zeros(NUM_ROWS, np.int32),
            np.zeros(NUM_ROWS, np.int32),
            np.zeros((1, 1), np.int32),
        )
        angles = torch.zeros(1, config.head_dim // 2)
        segments = [(a, b - a, 0.5, t) for (a, b), t in zip(adapted, tables, strict=True)]
        self.layers = LayeredPass(model, rows, (angles, angles), segments)
        self.hidden = self.random(NUM_ROWS, HIDDEN)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def weights(self, team: Team, config: ArchitectureConfig, dtype: torch.dtype) -> PackedWeights:
        shapes = config.weight_shapes()
        matrices = {
            name: pack(team, self.random(*shape).to(dtype), memory(shape, dtype))
            for name, shape in shapes.items()
            if len(shape) == 2
        }
        vectors = {name: torch.ones(shape) for name, shape in shapes.items() if len(shape) == 1}
        packed = PackedWeights(matrices, vectors)
        if dtype == torch.float32:
            return packed
        return packed.with_salient({"lm_head": torch.arange(3, 67, 2)})

    def adapter(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"lm_head": (self.random(5, HIDDEN), self.random(self.vocab_size, 5))}

    def targets(self, rows: Sequence[int]) -> Targets:
        """None, one or several of a row, the first and the last token among them."""
        counts = np.arange(len(rows)) % 4
        ids = torch.randint(self.vocab_size, (int(counts.sum()),), generator=self.generator).numpy()
        ids[::5], ids[1::5] = 0, self.vocab_size - 1
        starts = np.concatenate(([0], np.cumsum(counts)))
        return Targets(np.array(rows, np.int64), starts.astype(np.int64), ids)

    def assert_scores_are_those_of_the_logits(self, rows: Sequence[int]) -> None:
        targets = self.targets(rows)
        logits = torch.empty(len(rows), self.vocab_size)
        self.layers.logits(self.hidden, targets.rows, logits)
        with training_team() as team:
            norms = log_sum_exp(team, logits)
        scores = self.layers.scores(self.hidden, targets)
        owners = np.repeat(np.arange(len(rows)), np.diff(targets.starts))
        picked = logits[torch.from_numpy(owners), torch.from_numpy(targets.ids)]
        assert torch.equal(scores.norms, norms)
        assert torch.equal(scores.logits, picked)
        assert torch.equal(scores.logprobs(), (picked.double() - norms[owners]).float())


def memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """For packed weights, and in bfloat16 those of salient inputs."""
    spare = 0 if dtype == torch.float32 else 32
    return torch.zeros(packed_shape((shape[0], shape[1]), dtype, spare), dtype=dtype)


def tiny_config(vocab_size: int) -> ArchitectureConfig:
    return from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "max_position_embeddings": 16,
            "tie_word_embeddings": False,
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("vocab_size", SIZES)
def test_scores_are_those_of_the_logits_bit_for_bit(vocab_size: int, dtype: torch.dtype) -> None:
    unembedding = Unembedding(vocab_size, dtype, [(5, 17), (40, 280)])
    for rows in (range(NUM_ROWS), [0], [16, 17], range(0, 299, 3), range(100, 165)):
        unembedding.assert_scores_are_those_of_the_logits(list(rows))


def test_scores_of_capped_logits_are_those_of_the_logits() -> None:
    unembedding = Unembedding(3003, torch.float32, [(5, 17)], logit_cap=3.0)
    unembedding.assert_scores_are_those_of_the_logits(range(0, 299, 3))


def test_a_row_is_scored_alike_whoever_is_beside_it() -> None:
    unembedding = Unembedding(3003, torch.bfloat16, [(0, 10)])
    targets = unembedding.targets(range(NUM_ROWS))
    together = unembedding.layers.scores(unembedding.hidden, targets)
    for row in (0, 9, 63, 64, 299):
        first, last = targets.starts[row : row + 2]
        alone = Targets(
            np.array([row]), np.array([0, last - first]), targets.ids[first:last].copy()
        )
        scores = unembedding.layers.scores(unembedding.hidden, alone)
        assert scores.norms[0] == together.norms[row]
        assert torch.equal(scores.logits, together.logits[first:last])
