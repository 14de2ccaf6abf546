"""The operations of custom losses: one of ours for each name of `names`.

Nothing is looked up in torch by a name that a client sent: a name is a key of these tables.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinkercloud.losses.custom.functions import TORCH_FUNCTIONS
from tinkercloud.losses.custom.names import SHARED_METHODS

Operation = Callable[..., Any]
MAX_DIMENSIONS = 16
_LARGEST = 2**63


def _numbers_only(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _checked_number(value: Any) -> Any:
    """Python's integers grow without bound; those of a loss do not."""
    if isinstance(value, complex) or (isinstance(value, int) and abs(value) >= _LARGEST):
        raise OverflowError("the number does not fit in 64 bits")
    return value


def _arithmetic(compute: Operation) -> Operation:
    """Of tensors and numbers; texts and lists would be repeated, joined or formatted."""

    def run(*operands: Any) -> Any:
        if all(map(_numbers_only, operands)):
            return _checked_number(compute(*operands))
        if not all(isinstance(x, Tensor) or _numbers_only(x) for x in operands):
            raise TypeError("the operands must be tensors or numbers")
        return compute(*operands)

    return run


def _add(a: Any, b: Any) -> Any:
    """Shapes can be joined, too."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) + len(b) <= MAX_DIMENSIONS:
        return tuple(a) + tuple(b)
    return _plain_add(a, b)


def _power(base: Any, exponent: Any) -> Any:
    # Before it is computed: 9 ** 9 ** 9 has 370 million digits.
    small = isinstance(exponent, float) or isinstance(base, float) or abs(exponent) < 64
    if _numbers_only(base) and _numbers_only(exponent) and not small:
        raise OverflowError("the exponent is too large")
    return _plain_power(base, exponent)


def _equal(a: Any, b: Any) -> Any:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return a == b
    return _plain_equal(a, b)


_plain_add = _arithmetic(operator.add)
_plain_power = _arithmetic(operator.pow)
_plain_equal = _arithmetic(operator.eq)


def _attribute(value: Any, name: str) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is read of a tensor only")
    return _ATTRIBUTES[name](value)


_ATTRIBUTES: dict[str, Operation] = {
    "T": lambda x: x.transpose(0, 1) if x.ndim == 2 else x,
    "device": lambda x: x.device,
    "dtype": lambda x: x.dtype,
    "mT": lambda x: x.transpose(-2, -1),
    "ndim": lambda x: x.ndim,
    "shape": lambda x: tuple(x.shape),
}

_OPERATORS: dict[str, Operation] = {
    "abs": _arithmetic(operator.abs),
    "add": _add,
    "and_": _arithmetic(operator.and_),
    "eq": _equal,
    "floordiv": _arithmetic(operator.floordiv),
    "ge": _arithmetic(operator.ge),
    "getitem": operator.getitem,
    "gt": _arithmetic(operator.gt),
    "invert": _arithmetic(operator.invert),
    "le": _arithmetic(operator.le),
    "lt": _arithmetic(operator.lt),
    "matmul": _arithmetic(operator.matmul),
    "mod": _arithmetic(operator.mod),
    "mul": _arithmetic(operator.mul),
    "ne": _arithmetic(operator.ne),
    "neg": _arithmetic(operator.neg),
    "or_": _arithmetic(operator.or_),
    "pos": _arithmetic(operator.pos),
    "pow": _power,
    "sub": _arithmetic(operator.sub),
    "truediv": _arithmetic(operator.truediv),
    "xor": _arithmetic(operator.xor),
    # `x += y` writes x anew: a tensor that others read stays as it is.
    "iadd": _add,
    "iand": _arithmetic(operator.and_),
    "ifloordiv": _arithmetic(operator.floordiv),
    "imatmul": _arithmetic(operator.matmul),
    "imod": _arithmetic(operator.mod),
    "imul": _arithmetic(operator.mul),
    "ior": _arithmetic(operator.or_),
    "ipow": _power,
    "isub": _arithmetic(operator.sub),
    "itruediv": _arithmetic(operator.truediv),
    "ixor": _arithmetic(operator.xor),
}

_MATH: dict[str, Operation] = {
    "ceil": math.ceil,
    "copysign": math.copysign,
    "exp": math.exp,
    "expm1": math.expm1,
    "fabs": math.fabs,
    "floor": math.floor,
    "fmod": math.fmod,
    "hypot": math.hypot,
    "log": math.log,
    "log10": math.log10,
    "log1p": math.log1p,
    "log2": math.log2,
    "pow": math.pow,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "trunc": math.trunc,
}

_TENSOR_METHODS: dict[str, Operation] = {
    "bfloat16": Tensor.bfloat16,
    "bool": Tensor.bool,
    "contiguous": Tensor.contiguous,
    "cpu": lambda x: x,  # a loss runs in one place
    "cuda": lambda x, *_: x,
    "dim": Tensor.dim,
    "double": Tensor.double,
    "expand": Tensor.expand,
    "expand_as": Tensor.expand_as,
    "float": Tensor.float,
    "half": Tensor.half,
    "index_add": Tensor.index_add,
    "index_fill": Tensor.index_fill,
    "int": Tensor.int,
    "is_floating_point": Tensor.is_floating_point,
    "long": Tensor.long,
    "ndimension": Tensor.dim,
    "nelement": Tensor.numel,
    "new_full": Tensor.new_full,
    "new_ones": Tensor.new_ones,
    "new_zeros": Tensor.new_zeros,
    "numel": Tensor.numel,
    "repeat": Tensor.repeat,
    "repeat_interleave": Tensor.repeat_interleave,
    "reshape_as": Tensor.reshape_as,
    "size": lambda x, *dim: tuple(x.size()) if not dim else x.size(*dim),
    "to": Tensor.to,
    "type_as": Tensor.type_as,
    "view": Tensor.view,
    "view_as": Tensor.view_as,
    "where": Tensor.where,
}

FUNCTION_TABLE: dict[str, Operation] = {
    **TORCH_FUNCTIONS,
    **{f"operator.{name}": operation for name, operation in _OPERATORS.items()},
    **{f"math.{name}": operation for name, operation in _MATH.items()},
    "getattr": _attribute,
}
# Tensors made of numbers alone. They are told their device: `with torch.device(...)` misses what
# was replaced when it was first used, as torch.linspace is while transformers loads a model.
CREATING = frozenset(
    f"torch.{name}" for name in ("arange", "eye", "full", "linspace", "ones", "zeros")
)
METHOD_TABLE: dict[str, Operation] = {
    **{name: getattr(Tensor, name) for name in SHARED_METHODS},  # our names, once, at import
    **_TENSOR_METHODS,
}

CONSTANTS: dict[tuple[str, str], Any] = {
    ("dtype", "bfloat16"): torch.bfloat16,
    ("dtype", "bool"): torch.bool,
    ("dtype", "float16"): torch.float16,
    ("dtype", "float32"): torch.float32,
    ("dtype", "float64"): torch.float64,
    ("dtype", "int32"): torch.int32,
    ("dtype", "int64"): torch.int64,
    ("layout", "strided"): torch.strided,
    ("memory_format", "contiguous_format"): torch.contiguous_format,
    ("memory_format", "preserve_format"): torch.preserve_format,
}
