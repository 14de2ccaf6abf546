"""Tensors of a network that are in memory once: as the compiled pass reads them."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from tinkercloud.embedded.model.huge_pages import HugePages
from tinkercloud.embedded.native.packed import (
    PackedMatrix,
    PackedWeights,
    pack,
    packed_shape,
    unpack,
    unpack_rows,
)
from tinkercloud.embedded.native.train_bindings import training_team

NUM_SALIENT = 64
"""Of each module, or all inputs that it has: each matrix in bfloat16 has room for their weights
once more, which is two blocks of inputs (packed.h). Mean distance of SmolLM2's log-probabilities on
text from float32 arithmetic on the same rounded weights, where no errors of keys are kept: 0.0112
without, 0.0084 with 16, 0.0081 with 32, 0.0078 with 64, 0.0056 with all."""

EMBEDDING, UNEMBEDDING = "model.embed_tokens", "lm_head"


class PackedTensors(Mapping[str, Tensor]):
    """Read-only, by Hugging Face module name, in the network's number type. Each reading of a
    matrix unpacks a copy of it: what needs a few rows asks for `rows`, and a pass reads `packed`.
    """

    def __init__(self, packed: PackedWeights):
        self.packed = packed

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> "PackedTensors":
        """Packs one after the other, so that memory holds one of them besides. Without an "lm_head"
        among them the embedding is the unembedding too."""
        memory = HugePages()
        matrices: dict[str, PackedMatrix] = {}
        vectors: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if tensor.dim() == 1:
                vectors[name] = tensor.detach().float().clone()  # a file's tensor keeps all of it
                continue
            rows = tensor.detach()
            num_spare = NUM_SALIENT if rows.dtype == torch.bfloat16 else 0
            into = memory.empty(
                packed_shape((rows.shape[0], rows.shape[1]), rows.dtype, num_spare), rows.dtype
            )
            # The team is free between two: `tensors` may have use for it.
            with training_team() as team:
                matrices[name] = pack(team, rows, into)
        matrices.setdefault(UNEMBEDDING, matrices[EMBEDDING])
        return cls(PackedWeights(matrices, vectors))

    @property
    def salient_inputs(self) -> Mapping[str, Tensor]:
        """By module name; see `salience`."""
        return self.packed.salient

    def with_salient(self, inputs: Mapping[str, Tensor]) -> "PackedTensors":
        """The same tensors in the same memory. Trained weights have the inputs of their base: what
        is restored from a checkpoint computes as it did before."""
        return PackedTensors(self.packed.with_salient(inputs))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, Tensor]:
        """What it holds, by name, for `restored`; a tied unembedding once."""
        matrices = self.packed.matrices
        tied = matrices[UNEMBEDDING] is matrices[EMBEDDING]
        held = {n: m.packed for n, m in matrices.items() if not (tied and n == UNEMBEDDING)}
        return {**held, **self.packed.vectors}

    @classmethod
    def restored(
        cls, state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> "PackedTensors":
        """Of copies of a `state`. shapes: of the tensors, by name."""
        memory = HugePages()
        matrices: dict[str, PackedMatrix] = {}
        vectors: dict[str, Tensor] = {}
        for name, held in state.items():
            shape = shapes[name]
            if len(shape) == 1:
                vectors[name] = held.clone()
            else:
                place = memory.empty(tuple(held.shape), held.dtype).copy_(held)
                matrices[name] = PackedMatrix(place, (shape[0], shape[1]))
        matrices.setdefault(UNEMBEDDING, matrices[EMBEDDING])
        return cls(PackedWeights(matrices, vectors))

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a matrix (N, K): int64 ids (...) -> (..., K)."""
        rows = unpack_rows(self.packed.matrices[name], ids.flatten())
        return rows.view(*ids.shape, rows.shape[1])

    def __getitem__(self, name: str) -> Tensor:
        matrix = self.packed.matrices.get(name)
        if matrix is None:
            return self.packed.vectors[name].to(self.packed.dtype)
        with training_team() as team:
            return unpack(team, matrix)

    def __contains__(self, name: object) -> bool:
        return name in self.packed.matrices or name in self.packed.vectors

    def __iter__(self) -> Iterator[str]:
        yield from self.packed.matrices
        yield from self.packed.vectors

    def __len__(self) -> int:
        return len(self.packed.matrices) + len(self.packed.vectors)
