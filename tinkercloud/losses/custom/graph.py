"""A custom loss as it is sent: a torch.fx graph as plain data, checked before anything is computed.

Nothing here is executed. A node names an operation of `names` and takes the results of
earlier nodes only, so that there are no cycles (wire specification, section 7.9).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tinkercloud.errors import InvalidRequest
from tinkercloud.losses.custom.names import ATTRIBUTES, DTYPES, FUNCTIONS, METHODS

CUSTOM = "custom"
MAX_INPUTS = 16
MAX_NODES = 1000
MAX_ARGUMENTS = 20_000  # of all nodes together
MAX_DEPTH = 8  # of lists in lists
MAX_TEXT = 128
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_RANKS = (0, 1, 2)
_OPS = ("placeholder", "call_function", "call_method", "output")
_LAYOUTS = ("strided",)
_MEMORY_FORMATS = ("contiguous_format", "preserve_format")
_FLOATS = ("inf", "-inf", "nan")


@dataclass(frozen=True, slots=True)
class Reference:
    """The result of the node of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """kind: "dtype", "device", "layout" or "memory_format"; value: its name in torch."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Slice:
    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"node {self.name!r} ({self.target})"


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """inputs: (name, rank) of each, logprobs first. metrics: the nodes of each by its name."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    placeholders: tuple[str, ...]  # the nodes of the inputs
    nodes: tuple[Node, ...]  # the calls
    loss: Reference
    metrics: Mapping[str, Reference]


@lru_cache(maxsize=64)
def parse(text: str) -> CustomLoss:
    """From JSON with name, inputs and graph. Raises InvalidRequest with the fault."""
    return checked(json.loads(text))


def checked(body: Mapping[str, Any]) -> CustomLoss:
    """The same, of what JSON decodes to."""
    name = _text("name", body.get("name"))
    inputs = _inputs(body.get("inputs"))
    graph = body.get("graph")
    nodes = graph.get("nodes") if isinstance(graph, dict) and graph.get("format") == 1 else None
    if not isinstance(nodes, list):
        raise InvalidRequest('the graph of a custom loss needs "format": 1 and a list of nodes')
    if len(nodes) > MAX_NODES:
        raise InvalidRequest(f"the custom loss has {len(nodes)} nodes; at most {MAX_NODES} run")
    return _Reader(name, inputs).read(nodes)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise InvalidRequest(f"{what} of a custom loss must be a text of 1 to {MAX_TEXT}")
    return value


def _inputs(value: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise InvalidRequest(f"a custom loss has 1 to {MAX_INPUTS} inputs, logprobs first")
    inputs: list[tuple[str, int]] = []
    for entry in value:
        name = entry.get("name") if isinstance(entry, dict) else None
        rank = entry.get("rank") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _INPUT_NAME.fullmatch(name) or rank not in _RANKS:
            raise InvalidRequest(f"input {len(inputs)} of the custom loss needs a name and a rank")
        inputs.append((name, int(rank)))
    if inputs[0][0] != "logprobs" or inputs[0][1] == 0:
        raise InvalidRequest("the first input of a custom loss is logprobs, of rank 1 or 2")
    if len(dict(inputs)) != len(inputs):
        raise InvalidRequest("two inputs of the custom loss have the same name")
    return tuple(inputs)


class _Reader:
    """Reads the nodes in order; knows those that came before."""

    def __init__(self, name: str, inputs: tuple[tuple[str, int], ...]):
        self._name, self._inputs = name, inputs
        self._names: set[str] = set()
        self._placeholders: list[Node] = []
        self._num_arguments = 0

    def read(self, nodes: Sequence[Any]) -> CustomLoss:
        calls: list[Node] = []
        for index, entry in enumerate(nodes):
            node = self._node(index, entry)
            if node.op == "output":
                if index + 1 < len(nodes):
                    raise InvalidRequest("the output of a custom loss must be its last node")
                return self._loss(node, calls)
            if node.op == "placeholder":
                self._placeholders.append(node)
            else:
                _check_target(node)
                calls.append(node)
            if node.name in self._names:
                raise InvalidRequest(f"two nodes of the custom loss are named {node.name!r}")
            self._names.add(node.name)
        raise InvalidRequest("the custom loss has no output")

    def _node(self, index: int, entry: object) -> Node:
        if not isinstance(entry, dict):
            raise InvalidRequest(f"node {index} of the custom loss is no object")
        op = entry.get("op")
        if op not in _OPS:
            raise InvalidRequest(
                f"node {index} of the custom loss has the op {op!r}; a server can run "
                f"{', '.join(_OPS)}. Pass captured tensors and modules as inputs, or run the loss "
                "on the client: forward_backward_custom with the function itself"
            )
        name = _text(f"the name of node {index}", entry.get("name"))
        target = _text(f"the target of node {index}", entry.get("target"))
        args, kwargs = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise InvalidRequest(f"{name}: args must be a list and kwargs an object")
        where = f"node {name!r} ({target})"
        read = tuple(self._argument(where, argument) for argument in args)
        if "out" in kwargs:
            raise InvalidRequest(f"{where} writes to `out`; take its result instead")
        named = {_text(where, key): self._argument(where, value) for key, value in kwargs.items()}
        return Node(op, name, target, read, named)

    def _argument(self, where: str, value: Any, depth: int = 0) -> Any:
        self._num_arguments += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{where}: arguments are nested more than {MAX_DEPTH} deep")
        if self._num_arguments > MAX_ARGUMENTS:
            raise InvalidRequest(f"the custom loss has more than {MAX_ARGUMENTS} arguments")
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            if abs(value) >= 2**63:
                raise InvalidRequest(f"{where}: {str(value)[:30]}... does not fit in 64 bits")
            return value
        if isinstance(value, str):
            return _text(f"a text argument of {where}", value) if value else value
        if isinstance(value, list):
            return [self._argument(where, item, depth + 1) for item in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, inner),) = value.items()
            return self._special(where, str(kind), inner, depth + 1)
        raise InvalidRequest(f"{where}: an argument is neither JSON scalar, list nor known object")

    def _special(self, where: str, kind: str, inner: Any, depth: int) -> Any:
        """One of the one-key objects."""
        if kind == "ref" and isinstance(inner, str):
            if inner not in self._names:
                raise InvalidRequest(f"{where} refers to {inner!r}, which is no earlier node")
            return Reference(inner)
        if kind == "tuple" and isinstance(inner, list):
            return tuple(self._argument(where, item, depth) for item in inner)
        if kind == "dict" and isinstance(inner, dict):
            return {str(k): self._argument(where, v, depth) for k, v in inner.items()}
        if kind == "slice" and isinstance(inner, list) and len(inner) == 3:
            return Slice(*(self._argument(where, item, depth) for item in inner))
        if kind == "ellipsis" and inner is True:
            return ...
        constant = _constant(kind, inner)
        if constant is None:
            raise InvalidRequest(f"{where}: the argument {kind} {str(inner)[:40]!r} is not taken")
        return constant

    def _loss(self, output: Node, calls: list[Node]) -> CustomLoss:
        names = [name for name, _ in self._inputs]
        targets = [node.target for node in self._placeholders]
        if targets != names:
            raise InvalidRequest(
                f"the placeholders {targets} of the custom loss are not its inputs {names}"
            )
        pair = output.args[0] if len(output.args) == 1 else None
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidRequest("a custom loss returns (loss, metrics)")
        loss, metrics = pair
        if not isinstance(loss, Reference) or not isinstance(metrics, dict):
            raise InvalidRequest("a custom loss returns a tensor and a dict of tensors")
        placeholders = tuple(node.name for node in self._placeholders)
        return CustomLoss(
            *(self._name, self._inputs, placeholders, tuple(calls), loss), dict(_metrics(metrics))
        )


def _constant(kind: str, inner: Any) -> Any:
    """None where it is none that a loss may use."""
    if not isinstance(inner, str):
        return None
    if kind == "float":
        return float(inner) if inner in _FLOATS else None
    if kind == "device":  # wherever the loss runs
        return TorchConstant(kind, "cpu")
    tables = {"dtype": DTYPES, "layout": _LAYOUTS, "memory_format": _MEMORY_FORMATS}
    return TorchConstant(kind, inner) if inner in tables.get(kind, ()) else None


def _metrics(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Reference]]:
    for key, value in metrics.items():
        if not METRIC.fullmatch(key):
            raise InvalidRequest(
                f"metric {key[:MAX_TEXT]!r} must be named custom/<name>:sum or custom/<name>:mean"
            )
        if not isinstance(value, Reference):
            raise InvalidRequest(f"metric {key!r} must be a tensor")
        yield key, value


def _check_target(node: Node) -> None:
    allowed = FUNCTIONS if node.op == "call_function" else METHODS
    if node.target not in allowed:
        raise InvalidRequest(
            f"{node.title} is not among the operations that a custom loss may use on this server; "
            "write it with others, or run the loss on the client: forward_backward_custom with the "
            "function itself"
        )
    if node.target == "getattr" and (len(node.args) != 2 or node.args[1] not in ATTRIBUTES):
        raise InvalidRequest(
            f"{node.title} reads an attribute that is not one of {', '.join(sorted(ATTRIBUTES))}"
        )
