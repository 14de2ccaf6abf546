"""Products with frozen, adapted or trainable matrices, and their gradients, without a tape: through
PyTorch, or the compiled pass.

y = W x + b + (alpha / rank) B A x. Modules that read the same rows (q, k and v) are one product
where their matrices are contiguous in memory (`join_weights`). Rows of several models may share the
product with W; the low-rank products are computed segment by segment.

Axes: T packed rows, R rank, G modules of one group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from tinkercloud.embedded.native.bindings import AdapterTable
from tinkercloud.embedded.native.linear_gradient import (
    AdaptedRows,
    Factors,
    Gates,
    Outputs,
    linear_gradient,
)
from tinkercloud.embedded.native.packed import PackedMatrix, PackedWeights
from tinkercloud.embedded.native.train_bindings import training_team
from tinkercloud.weights.adapters import Adapter


@dataclass(slots=True)
class ModelWeights:
    """One model's weights in a pass. Exactly one of adapter and full is not None.

    full: the trained float32 tensors; values: the same in the base's number type, as a pass reads
    them, without the matrices where these are packed for the compiled pass. packed: all of them, or
    the base's with an adapter, whose factors are packed too; None without the compiled pass. grads:
    the accumulated gradients by parameter name, float32; a missing name means zero.
    """

    adapter: Adapter | None
    scale: float
    full: Mapping[str, Tensor] | None
    values: Mapping[str, Tensor] | None
    packed: PackedWeights | None
    factors: AdapterTable | None
    grads: dict[str, Tensor] = field(default_factory=dict)

    def grad(self, name: str, like: Tensor) -> Tensor:
        """The accumulator of a parameter."""
        if name not in self.grads:
            self.grads[name] = torch.zeros_like(like, requires_grad=False)
        return self.grads[name]

    def adapts(self, name: str) -> bool:
        return self.adapter is not None and name in self.adapter


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start..stop-1 of an input belong to `model`."""

    model: ModelWeights
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def join_weights(weights: dict[str, Tensor], groups: Sequence[Sequence[str]]) -> None:
    """Make the matrices of each group contiguous; `weights` then holds views of the whole.

    Values stay bitwise; the separate copies are freed as soon as nothing else refers to them.
    """
    for names in groups:
        whole = torch.cat([weights[name] for name in names])
        sizes = [weights[name].shape[0] for name in names]
        weights.update(zip(names, whole.split(sizes), strict=True))


def joined(matrices: Sequence[Tensor]) -> Tensor | None:
    """One (sum of rows, columns) view of contiguous matrices, or None."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    address, rows = first.data_ptr(), 0
    for matrix in matrices:
        same = matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and matrix.is_contiguous() and matrix.data_ptr() == address):
            return None
        address += matrix.numel() * matrix.element_size()
        rows += matrix.shape[0]
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


class Linears:
    """The linear modules of one base for the rows of one pass.

    weights: the base's tensors. A model with full weights is alone in its pass: it shares no
    product with others.
    """

    def __init__(self, weights: Mapping[str, Tensor], models: Sequence[ModelWeights]):
        self._weights = models[0].values or weights
        self.packed = models[0].packed
        self._models = models
        self._full = models[0].full or {}
        assert len(models) == 1 or not any(model.full for model in models)

    def weight(self, name: str) -> Tensor:
        """In the base's number type."""
        return self._weights[name]

    @property
    def fuses(self) -> bool:
        """Whether the gradient of what modules have put out may be computed by the product that
        reads it: by the compiled pass, for adapters."""
        return self.packed is not None and not self._full

    def trains(self, name: str) -> bool:
        """Whether this tensor itself is trained, rather than an adapter of it."""
        return name in self._full

    def add_norm_gradient(
        self, name: str, x: Tensor, inverse: Tensor, dy: Tensor, slope: float
    ) -> None:
        """Of the weight of a norm whose input was x, where it is trained; slope: of its scale."""
        if name in self._full:
            grad = dy.float() * x.float() * inverse * slope
            model = self._models[0]
            model.grad(name, self._full[name]).add_(grad.flatten(0, -2).sum(0))

    def add_embedding_gradient(self, tokens: Tensor, dx: Tensor, scale: float) -> None:
        """dx (T, D) of rows that were looked up, times scale, where the embedding is trained."""
        name = "model.embed_tokens"
        if name in self._full:
            grad = self._models[0].grad(name, self._full[name])
            grad.index_add_(0, tokens, dx.float(), alpha=scale)

    def bias(self, name: str) -> Tensor | None:
        return self._weights.get(f"{name}.bias")

    def num_outputs(self, name: str) -> int:
        if self.packed is not None:
            return self.packed.matrices[name].shape[0]
        return self._weights[name].shape[0]

    def input_gradient(self, columns: Mapping[str, slice], dy: Tensor) -> Tensor:
        """dy W over these modules, whose outputs are its columns; in dy's type."""
        matrices = [self._weights[name] for name in columns]
        return _back(matrices, list(columns.values()), dy)

    def add_matrix_gradients(self, columns: Mapping[str, slice], x: Tensor, dy: Tensor) -> None:
        """Of these modules, whose outputs are the columns of dy, where they are trained."""
        if not self._full:
            return
        model = self._models[0]
        if self.packed is not None:
            x = x.to(self.packed.dtype).to(x.dtype)  # as the product has read it
        for name, span in columns.items():
            parameter, bias = parameter_name(self._full, name), f"{name}.bias"
            rows = dy[:, span]
            _add_product(model.grad(parameter, self._full[parameter]), rows.t(), x)
            if bias in self._full:
                model.grad(bias, self._full[bias]).add_(rows.float().sum(0))


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that read the same rows, and whose rows these are.

    In a backward pass x and dy are of one type: the base's, or float32 where the forward pass was
    compiled. Then products read both rounded to the base's type, and only sums are float32.
    """

    linears: Linears
    names: Sequence[str]
    segments: Sequence[Segment]

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x (T, in) -> the modules' outputs side by side (T, sum of outs). All in x's number type;
        in bfloat16 the adapters' products are too, summed up in float32 before they are rounded."""
        matrices = [self.linears.weight(name) for name in self.names]
        columns = self._columns()
        y = x.new_empty(x.shape[0], columns[-1].stop) if out is None else out
        biases = [self.linears.bias(name) for name in self.names]
        # In bfloat16 a bias is added before the sum is rounded, as `F.linear` does.
        fused = x.dtype != torch.float32 and any(bias is not None for bias in biases)
        whole = None if fused else joined(matrices)
        if whole is not None:
            torch.mm(x, whole.t(), out=y)
        for matrix, bias, span in zip(matrices, biases, columns, strict=True):
            if fused and bias is not None:
                torch.addmm(bias, x, matrix.t(), out=y[:, span])
                continue
            if whole is None:
                torch.mm(x, matrix.t(), out=y[:, span])
            if bias is not None:
                y[:, span] += bias
        for at in self.segments:
            self._add_low_rank(at, x, y, columns)
        return y

    def backward(self, x: Tensor, dy: Tensor, *, wants_dx: bool = True) -> Tensor | None:
        """Adds the parameters' gradients to the models; returns dx (T, in) where it is wanted."""
        columns = dict(zip(self.names, self._columns(), strict=True))
        self.linears.add_matrix_gradients(columns, x, dy)
        if self.linears.packed is not None:
            outputs = Outputs(self.matrices(), dy, [span.start for span in columns.values()])
            return self._compiled_backward(x, outputs, wants_dx=wants_dx)
        dx = self.linears.input_gradient(columns, dy) if wants_dx else None
        for at in self.segments:
            if self._adapted(at):
                ddown = self._low_rank_gradients(at, x[at.rows], dy[at.rows])
                if dx is not None:
                    dx[at.rows].addmm_(ddown, _stacked(at.model, self._adapted(at)).to(dx.dtype))
        return dx

    def matrices(self) -> list[PackedMatrix]:
        """Of the compiled pass."""
        packed = self.linears.packed
        assert packed is not None
        return [packed.matrices[name] for name in self.names]

    def backward_from(self, x: Tensor | Gates, outputs: Outputs) -> Tensor:
        """As `backward`, where `linears.fuses`: what is as wide as the vocabulary or the gates is
        then in no memory."""
        assert self.linears.fuses
        dx = self._compiled_backward(x, outputs, wants_dx=True)
        assert dx is not None
        return dx

    def _compiled_backward(
        self, x: Tensor | Gates, outputs: Outputs, *, wants_dx: bool
    ) -> Tensor | None:
        segments = [at for at in self.segments if at.stop > at.start and self._adapted(at)]
        adapted = [self._adapted_rows(at) for at in segments]
        if not (adapted or wants_dx):
            return None
        with training_team() as team:
            return linear_gradient(team, x, outputs, adapted, wants_dx=wants_dx)

    def _adapted_rows(self, at: Segment) -> AdaptedRows:
        factors = [_factors(at.model, n) if at.model.adapts(n) else None for n in self.names]
        rank = next(module.a.shape[0] for module in factors if module is not None)
        return AdaptedRows(at.start, at.stop - at.start, rank, at.model.scale, factors)

    def _columns(self) -> list[slice]:
        """Of the modules' outputs side by side."""
        ends = list(accumulate(map(self.linears.num_outputs, self.names)))
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def _adapted(self, at: Segment) -> list[str]:
        return [name for name in self.names if at.model.adapts(name)]

    def _add_low_rank(self, at: Segment, x: Tensor, y: Tensor, columns: Sequence[slice]) -> None:
        adapted = self._adapted(at)
        if not adapted:
            return
        down = torch.mm(x[at.rows], _stacked(at.model, adapted).to(x.dtype).t())
        for name, low in zip(adapted, down.chunk(len(adapted), dim=1), strict=True):
            _, b = _pair(at.model, name)
            target = y[at.rows, columns[self.names.index(name)]]
            target.addmm_(low, b.to(x.dtype).t(), alpha=at.model.scale)

    def _low_rank_gradients(self, at: Segment, x: Tensor, dy: Tensor) -> Tensor:
        """All of one segment's rows. Returns the gradient of A x, which is not kept but computed
        again: that costs a thirtieth of a step."""
        model, adapted = at.model, self._adapted(at)
        columns = self._columns()
        down = torch.mm(x, _stacked(model, adapted).to(x.dtype).t())
        ddown = torch.empty_like(down)
        num = len(adapted)
        for name, low, dlow in zip(
            adapted, down.chunk(num, dim=1), ddown.chunk(num, dim=1), strict=True
        ):
            _, b = _pair(model, name)
            rows = dy[:, columns[self.names.index(name)]]
            torch.mm(rows, (b * model.scale).to(rows.dtype), out=dlow)
            _add_product(model.grad(f"{name}.lora_B", b), rows.t(), low, scale=model.scale)
        da = torch.mm(ddown.t(), x)
        for name, grad in zip(adapted, da.chunk(num), strict=True):
            model.grad(f"{name}.lora_A", _pair(model, name)[0]).add_(grad)
        return ddown


def parameter_name(full: Mapping[str, Tensor], name: str) -> str:
    """The name under which a tied unembedding is trained: the embedding's."""
    if name == "lm_head" and full[name] is full["model.embed_tokens"]:
        return "model.embed_tokens"
    return name


def _factors(model: ModelWeights, name: str) -> Factors:
    a, b = _pair(model, name)
    da, db = model.grad(f"{name}.lora_A", a), model.grad(f"{name}.lora_B", b)
    return Factors(a, b, da, db)


def _pair(model: ModelWeights, name: str) -> tuple[Tensor, Tensor]:
    assert model.adapter is not None
    a, b = model.adapter[name]
    return a.detach(), b.detach()


def _stacked(model: ModelWeights, names: Sequence[str]) -> Tensor:
    """A of all the modules, (R * G, in)."""
    if len(names) == 1:
        return _pair(model, names[0])[0]
    return torch.cat([_pair(model, name)[0] for name in names])


def _add_product(grad: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """grad += scale a b; grad is float32 whatever a and b are."""
    if a.dtype == grad.dtype:
        grad.addmm_(a, b, alpha=scale)
    else:
        grad.add_(torch.mm(a, b), alpha=scale)


def _back(matrices: Sequence[Tensor], columns: Sequence[slice], dy: Tensor) -> Tensor:
    whole = joined(matrices)
    if whole is not None:
        return torch.mm(dy, whole)
    dx = torch.mm(dy[:, columns[0]], matrices[0])
    for matrix, span in zip(matrices[1:], columns[1:], strict=True):
        dx.addmm_(dy[:, span], matrix)
    return dx
