"""A custom loss of one datum: its graph, node by node, on the CPU, within bounds.

Before a node is computed it is computed on torch's meta device, which knows shapes only: what would
be too large is refused before memory is taken. The CPU, since an index that is out of range ends a
CUDA context for everybody, and here it raises an error.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tinkercloud.errors import UserError
from tinkercloud.losses.custom.graph import CustomLoss, Node, Reference, Slice, TorchConstant, parse
from tinkercloud.losses.custom.operations import (
    CONSTANTS,
    CREATING,
    FUNCTION_TABLE,
    MAX_DIMENSIONS,
    METHOD_TABLE,
)

MAX_ELEMENTS = 2**24  # of one tensor
MAX_TOTAL_ELEMENTS = 2**26  # of all tensors of one datum: autograd keeps them
MAX_WORK = 2**33  # multiply-adds of one datum
MAX_PARTS = 4096  # tensors that one operation may return
MAX_SECONDS = 20.0  # of one datum
_PRODUCTS = ("matmul", "imatmul", "mm", "bmm", "mv", "dot", "outer", "vecdot")
_MANY = ("split", "unbind", "chunk")
_TEXTS = frozenset(
    (
        *("none", "mean", "sum", "batchmean"),  # reduction
        *("floor", "trunc", "tanh", "fro", "add", "multiply"),
        *("constant", "reflect", "replicate", "circular"),  # of pad
        *("linear", "lower", "higher", "nearest", "midpoint"),  # of quantile
    )
)
_FAULTS = (
    *(ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError),
    *(TypeError, ValueError),
)


def run(text: str, logprobs: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """(the scalar loss, with a gradient where logprobs has one; metrics).

    text: as `parse` takes it. logprobs: float32 (N,) or (N, K) on the CPU. inputs: arrays by name.
    Raises UserError.
    """
    loss = parse(text)
    values = [logprobs, *(_tensor(inputs[name], rank) for name, rank in loss.inputs[1:])]
    return _Run(loss, values).result()


def loss_and_gradient(
    text: str, logprobs: Tensor, inputs: Mapping[str, Any], *, with_gradient: bool
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(loss, d loss / d logprobs, metrics), without a graph; zeros where no gradient is asked for.

    logprobs: on any device; so are the results. Raises UserError.
    """
    leaf = logprobs.detach().float().cpu().requires_grad_(with_gradient)
    gradient = torch.zeros_like(leaf)
    with torch.set_grad_enabled(with_gradient):
        loss, metrics = run(text, leaf, inputs)
        if with_gradient:
            try:
                (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=False)
            except RuntimeError as error:
                raise UserError(
                    f"custom loss {parse(text).name!r} has no gradient: {str(error)[:300]}"
                ) from None
    value = loss.detach().to(logprobs.device, torch.float32)
    return value, gradient.to(logprobs.device, torch.float32), metrics


def _tensor(array: Any, rank: int) -> Tensor:
    tensor = torch.from_numpy(array.copy())  # a loss may not change the datum
    return tensor.reshape(()) if rank == 0 else tensor


@dataclass(slots=True)
class _Run:
    loss: CustomLoss
    inputs: Sequence[Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    num_elements: int = 0
    work: int = 0

    def result(self) -> tuple[Tensor, dict[str, float]]:
        deadline = time.monotonic() + MAX_SECONDS
        self.values.update(zip(self.loss.placeholders, self.inputs, strict=True))
        for node in self.loss.nodes:
            if time.monotonic() > deadline:
                raise UserError(f"{self._title}: one datum took more than {MAX_SECONDS:g} seconds")
            self.values[node.name] = self._node(node)
        loss = self._scalar(self.loss.loss, "loss")
        if self.inputs[0].requires_grad and not loss.requires_grad:
            raise UserError(f"{self._title} does not depend on logprobs, so it has no gradient")
        metrics = {
            name: float(self._scalar(reference, name).detach())
            for name, reference in self.loss.metrics.items()
        }
        return loss, metrics

    @property
    def _title(self) -> str:
        return f"custom loss {self.loss.name!r}"

    def _scalar(self, reference: Reference, what: str) -> Tensor:
        value = self.values[reference.name]
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != ():
            raise UserError(f"{self._title}: {what} must be a scalar tensor, not {shape}")
        return value

    def _node(self, node: Node) -> Any:
        table = FUNCTION_TABLE if node.op == "call_function" else METHOD_TABLE
        operation = table[node.target]
        try:
            if node.op == "call_method" and not isinstance(self._value(node.args[0]), Tensor):
                raise TypeError("a method is called on a tensor only")
            self._check_parts(node)
            if not _sized_by_values(node, self._value):
                meta, options = _arguments(node, lambda argument: _meta(self._value(argument)))
                if node.op == "call_function" and node.target in CREATING:
                    options["device"] = torch.device("meta")
                with torch.no_grad():
                    self._count(node, operation(*meta, **options))
            args, kwargs = _arguments(node, self._value)
            value = operation(*args, **kwargs)
            if _sized_by_values(node, self._value):
                self._count(node, value)
            return value
        except _FAULTS as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise UserError(f"{self._title}, {node.title}: {reason}") from None

    def _check_parts(self, node: Node) -> None:
        if node.target.rpartition(".")[2] not in _MANY:
            return
        first = self._value(node.args[0])
        if isinstance(first, Tensor) and max(first.shape, default=0) > MAX_PARTS:
            raise ValueError(f"it could return more than {MAX_PARTS} tensors")

    def _count(self, node: Node, value: Any) -> None:
        """Before memory is taken, wherever the size is known before."""
        tensors = [t for t in _flat(value) if isinstance(t, Tensor)]
        if max((t.ndim for t in tensors), default=0) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
        largest = max((t.numel() for t in tensors), default=0)
        if largest > MAX_ELEMENTS:
            raise ValueError(f"a tensor of {largest} elements; at most {MAX_ELEMENTS} are allowed")
        num_out = sum(t.numel() for t in tensors)
        self.num_elements += num_out
        if self.num_elements > MAX_TOTAL_ELEMENTS:
            raise ValueError(
                f"with it the loss of one datum has {self.num_elements} elements; at most "
                f"{MAX_TOTAL_ELEMENTS} are allowed"
            )
        operands = [t for t in _flat(_arguments(node, self._value)) if isinstance(t, Tensor)]
        inner = 1
        if node.target.rpartition(".")[2] in _PRODUCTS and operands and operands[0].ndim:
            inner = operands[0].shape[-1]
        self.work += num_out * inner + sum(t.numel() for t in operands)
        if self.work > MAX_WORK:
            raise ValueError(f"with it one datum takes more than {MAX_WORK} steps")

    def _value(self, argument: Any) -> Any:
        """What an argument stands for, with the results of earlier nodes in place."""
        match argument:
            case Reference(name):
                return self.values[name]
            case TorchConstant("device", _):
                return torch.device("cpu")
            case TorchConstant(kind, name):
                return CONSTANTS[kind, name]
            case Slice(start, stop, step):
                return slice(self._value(start), self._value(stop), self._value(step))
            case list():
                return [self._value(item) for item in argument]
            case tuple():
                return tuple(self._value(item) for item in argument)
            case dict():
                return {name: self._value(item) for name, item in argument.items()}
            case str() if argument.partition(":")[0] in ("cpu", "cuda"):
                return torch.device("cpu")
            case _:
                return argument


def _arguments(
    node: Node, value_of: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Raises ValueError for a text that none of the options here is."""
    first = 1 if node.target == "getattr" else len(node.args)
    values = (*node.args[:first], *node.kwargs.values())
    for text in (v for v in values if isinstance(v, str)):
        if text not in _TEXTS and text.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"the text {text[:40]!r} is not taken")
    args = tuple(value_of(argument) for argument in node.args)
    return args, {name: value_of(argument) for name, argument in node.kwargs.items()}


def _meta(value: Any) -> Any:
    """The same, without contents."""
    match value:
        case Tensor():
            return value.detach().to("meta")
        case torch.device():
            return torch.device("meta")
        case slice():
            return slice(_meta(value.start), _meta(value.stop), _meta(value.step))
        case list():
            return [_meta(item) for item in value]
        case tuple():
            return tuple(_meta(item) for item in value)
        case dict():
            return {name: _meta(item) for name, item in value.items()}
        case _:
            return value


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [inner for item in value for inner in _flat(item)]
    if isinstance(value, dict):
        return [inner for item in value.values() for inner in _flat(item)]
    return [value]


def _sized_by_values(node: Node, value_of: Callable[[Any], Any]) -> bool:
    """Whether the result's shape depends on the values of a mask; it is bounded by the operands
    then. Raises ValueError where it is not.
    """
    name = node.target.rpartition(".")[2]
    if name == "masked_select":
        shapes = [v.shape for v in map(value_of, node.args) if isinstance(v, Tensor)]
        if math.prod(torch.broadcast_shapes(*shapes)) > MAX_ELEMENTS:
            raise ValueError(f"more than {MAX_ELEMENTS} elements to select from")
        return True
    if name != "getitem":
        return False
    index = value_of(node.args[1])
    parts = index if isinstance(index, tuple) else (index,)
    arrays = [p for p in parts if isinstance(p, list | Tensor)]
    masks = [p for p in arrays if isinstance(p, Tensor) and p.dtype == torch.bool]
    if masks and len(arrays) > 1:
        raise ValueError("one mask alone, with slices, may index a tensor")
    return bool(masks)
