"""Custom losses as graphs: traced by torch.fx, for the server to run (specification 7.9)."""

import builtins
import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tinker_gmi.bodies.custom_losses import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
)
from tinker_gmi.bodies.tensors import Datum

PerDatumLossFn = Callable[..., tuple[Any, Mapping[str, Any]]]
"""(logprobs, the loss_fn_inputs that it names, torch tensors all) -> (scalar loss, metrics named
custom/NAME:sum or custom/NAME:mean)."""

MAX_INPUTS = 16
MODULES = ("torch", "math", "operator", "_operator")
LEAVES_TORCH = ("item", "numpy", "tolist", "backward")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class LossHandle:
    """A loss of `create_custom_loss`, for `forward_backward_custom` of its session's clients.

    inputs: `logprobs` and then the loss_fn_inputs, in the order of the parameters. graph: the
    traced loss, which is what runs. loss_id: of the upload; None: it runs in the client.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: Any = field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """Without logprobs."""
        return tuple(each.name for each in self.inputs[1:])


def trace_loss(
    function: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
) -> LossHandle:
    """A handle of no session yet. Raises ValueError where torch.fx cannot trace the function, or it
    uses more than torch and math."""
    name = getattr(function, "__name__", type(function).__name__)
    inputs = _inputs(name, function, input_ranks)
    fx = importlib.import_module("torch.fx")
    try:
        graph = fx.symbolic_trace(function)
    except Exception as error:  # tracing runs the user's function
        raise ValueError(
            f"custom loss {name!r} cannot be traced: {error}. It may not branch on the values of "
            "tensors, and calls torch and math alone"
        ) from error
    for node in graph.graph.nodes:
        trouble = _trouble(node)
        if trouble is not None:
            raise ValueError(f"custom loss {name!r} {trouble}")
    return LossHandle(name, inputs, "", graph)


def _inputs(
    name: str, function: PerDatumLossFn, ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    if names[:1] != ["logprobs"]:
        raise ValueError(f"the first parameter of custom loss {name!r} must be logprobs")
    if len(names) > MAX_INPUTS:
        raise ValueError(f"custom loss {name!r} has {len(names)} parameters; at most {MAX_INPUTS}")
    for parameter in parameters:
        positional = parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        required = parameter.default is inspect.Parameter.empty
        if not (positional and required and INPUT_NAME.fullmatch(parameter.name)):
            raise ValueError(
                f"parameter {parameter.name!r} of custom loss {name!r} must be positional, without "
                "a default, and its name of lowercase letters, digits and underscores"
            )
    if set(ranks) != set(names):
        raise ValueError(
            f"input_ranks must name the parameters of custom loss {name!r} ({', '.join(names)}); "
            f"it names {', '.join(sorted(ranks)) or 'none'}"
        )
    if ranks["logprobs"] == 0:
        raise ValueError("logprobs has the rank of target_tokens: 1 or 2")
    return tuple(CustomLossInput(name=each, rank=ranks[each]) for each in names)


def _trouble(node: Any) -> str | None:
    """Why a node of the trace cannot be sent; None: it can."""
    match node.op:
        case "call_function":
            module = str(getattr(node.target, "__module__", None) or "an unknown module")
            sendable = module.partition(".")[0] in MODULES or node.target is builtins.getattr
            return None if sendable else f"calls {node.target!r} of {module}; only torch and math"
        case "call_method":
            tensor = importlib.import_module("torch").Tensor
            if node.target in LEAVES_TORCH:
                return f"calls {node.target}(); it must keep all values as tensors and return them"
            is_method = hasattr(tensor, node.target)
            return None if is_method else f"calls {node.target}(), which is no method of tensors"
        case "call_module":
            return f"uses the module {node.target!r}; only functions can be sent"
        case "get_attr":
            return f"uses {node.target!r} from outside; it may use logprobs and its inputs only"
        case "output":
            return _output_trouble(node.args[0])
        case _:
            return None


def _output_trouble(output: Any) -> str | None:
    node_type = importlib.import_module("torch.fx").Node
    values = cast("Sequence[Any]", output) if isinstance(output, tuple | list) else ()
    if len(values) != 2 or not isinstance(values[1], dict):
        return "must return (loss, metrics), the second a dict"
    if not isinstance(values[0], node_type):
        return "must return its loss as a tensor"
    for metric, value in cast("dict[Any, Any]", values[1]).items():
        if not METRIC_NAME.fullmatch(str(metric)):
            return f"has a metric {metric!r}; it must be custom/NAME:sum or custom/NAME:mean"
        if not isinstance(value, node_type):
            return f"has a metric {metric!r} that is no tensor"
    return None


def encoded_graph(handle: LossHandle) -> CustomLossGraph:
    """The graph as JSON. Raises ValueError for an argument that JSON has no form for."""
    nodes: list[CustomLossNode] = []
    for node in handle.graph.graph.nodes:
        node_args = cast("Sequence[Any]", node.args)
        node_kwargs = cast("Mapping[str, Any]", node.kwargs)
        nodes.append(
            CustomLossNode(
                op=node.op,
                name=node.name,
                target=_target(node),
                args=[_encoded(arg) for arg in node_args],
                kwargs={key: _encoded(arg) for key, arg in node_kwargs.items()},
            )
        )
    return CustomLossGraph(nodes=nodes)


def _target(node: Any) -> str:
    if node.op != "call_function":
        return str(node.target)
    name = str(importlib.import_module("torch.fx.node")._get_qualified_name(node.target))
    # Operators live in CPython's module _operator; on the wire they have its public name.
    return f"operator.{name.removeprefix('_operator.')}" if name.startswith("_operator.") else name


def _encoded(arg: Any) -> Any:
    torch = importlib.import_module("torch")
    kinds = {
        torch.dtype: "dtype",
        torch.device: "device",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    match arg:
        case float() if not math.isfinite(arg):
            return {"float": str(arg)}
        case None | bool() | int() | float() | str():
            return arg
        case slice():
            bounds = cast("slice[Any, Any, Any]", arg)
            return {"slice": [_encoded(part) for part in (bounds.start, bounds.stop, bounds.step)]}
        case dict():
            items = cast("dict[Any, Any]", arg).items()
            return {"dict": {str(key): _encoded(value) for key, value in items}}
        case tuple():
            return {"tuple": [_encoded(part) for part in cast("tuple[Any, ...]", arg)]}
        case list():
            return [_encoded(part) for part in cast("list[Any]", arg)]
        case _ if arg is Ellipsis:
            return {"ellipsis": True}
        case _ if isinstance(arg, importlib.import_module("torch.fx").Node):
            return {"ref": arg.name}
        case _ if type(arg) in kinds:
            return {kinds[type(arg)]: str(arg).removeprefix("torch.")}
        case _:
            raise ValueError(f"a custom loss cannot send an argument of type {type(arg).__name__}")


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Raises ValueError where a datum lacks an input, or has it in another rank."""
    for index, datum in enumerate(data):
        for declared in handle.inputs:
            key = "target_tokens" if declared.name == "logprobs" else declared.name
            if key not in datum.loss_fn_inputs:
                raise ValueError(f"datum {index} has no {key!r}, which loss {handle.name!r} needs")
            rank = len(datum.loss_fn_inputs[key].shape or ())
            if rank != declared.rank:
                raise ValueError(
                    f"{key!r} of datum {index} has rank {rank}; loss {handle.name!r} declared "
                    f"{declared.name} with rank {declared.rank}"
                )


def run_traced(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[Any]
) -> tuple[Any, dict[str, float]]:
    """The sum of the datums' losses, and their metrics as the names say."""
    total: Any = 0.0
    sums: dict[str, float] = {}
    for datum, datum_logprobs in zip(data, logprobs, strict=True):
        inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
        loss, metrics = handle.graph(datum_logprobs, *inputs)
        if loss.ndim != 0:
            raise ValueError(f"loss {handle.name!r} must be a scalar, not {tuple(loss.shape)}")
        total = total + loss
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    means = {name: value / len(data) for name, value in sums.items() if name.endswith(":mean")}
    return total, sums | means
