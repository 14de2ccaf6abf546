"""Custom losses: the official client's graphs give what torch gives; hostile ones are refused."""

import gc
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinker.lib.public_interfaces.custom_loss as sdk
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._device import _device_constructors

from tinkercloud.errors import InvalidRequest, UserError
from tinkercloud.losses.custom.evaluation import loss_and_gradient
from tinkercloud.losses.custom.functions import TORCH_FUNCTIONS
from tinkercloud.losses.custom.graph import MAX_NODES, parse
from tinkercloud.losses.custom.names import FUNCTIONS, METHODS
from tinkercloud.losses.custom.operations import CREATING, FUNCTION_TABLE, METHOD_TABLE

ADVANTAGES = np.array([1.0, -0.5, 0.0, 2.0], np.float32)
OLD = np.array([-1.0, -2.0, -0.3, -0.7], np.float32)
LOGPROBS = torch.tensor([-1.1, -1.7, -0.4, -0.9])
INPUTS = {"advantages": ADVANTAGES, "old": OLD, "scale": np.array([0.5], np.float32)}


def uploaded(loss: Callable[..., Any], **ranks: int) -> str:
    """What the official client sends of it."""
    handle = sdk.trace_loss(loss, ranks, "session")
    graph = sdk.encode_graph(handle).model_dump(mode="json")
    inputs = [loss_input.model_dump() for loss_input in handle.inputs]
    return json.dumps({"name": handle.name, "inputs": inputs, "graph": graph})


def clipped(logprobs: Tensor, advantages: Tensor, old: Tensor):
    ratio = torch.exp(logprobs - old)
    low = torch.clamp(ratio, 0.8, 1.2) * advantages
    loss = -torch.minimum(ratio * advantages, low).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": (ratio > 0).sum()}


def scaled(logprobs: Tensor, scale: Tensor):
    return (logprobs * scale).sum() ** 2, {}


def masked(logprobs: Tensor, advantages: Tensor):
    kept = logprobs[advantages > 0]
    weight = torch.where(advantages != 0, 1.0, float("-inf")).isfinite().float()
    rest = (logprobs.masked_fill(advantages < 0, 0.0) * weight)[..., 1:].mean()
    return kept.sum() * logprobs.shape[0] + rest, {}


def shaped(logprobs: Tensor, advantages: Tensor):
    pairs = logprobs[:, None] - logprobs[None]
    order = (advantages[:, None] - advantages[None]).sign()
    total = -F.logsigmoid(pairs * order).sum() / pairs.numel()
    zeros = torch.zeros_like(logprobs, dtype=torch.float64, device=logprobs.device)
    return total + (zeros.to(torch.float32) + logprobs).sum() / logprobs.size(0), {}


def functional(logprobs: Tensor, old: Tensor):
    q = F.softmax(old, dim=-1)
    a = F.kl_div(logprobs, q, reduction="sum") + F.softplus(logprobs).sum()
    b = F.huber_loss(logprobs, old, reduction="mean", delta=0.5) + F.smooth_l1_loss(logprobs, old)
    values, _ = torch.topk(logprobs, 2)
    c = torch.logsumexp(torch.stack([logprobs, old]), dim=0).sum() + values.sum()
    d = torch.cat((logprobs, old)).std() + logprobs.flip(0).cumsum(0)[-1]
    d = d + torch.special.expit(old)[0]
    return a + b + c + d - abs(-logprobs).max(), {"custom/a:sum": a}


CASES = [
    (clipped, {"advantages": 1, "old": 1}),
    (scaled, {"scale": 0}),
    (masked, {"advantages": 1}),
    (shaped, {"advantages": 1}),
    (functional, {"old": 1}),
]


@pytest.mark.parametrize(("loss", "ranks"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_loss_gradient_and_metrics_are_those_of_torch(
    loss: Callable[..., Any], ranks: dict[str, int]
) -> None:
    text = uploaded(loss, logprobs=1, **ranks)
    value, gradient, metrics = loss_and_gradient(text, LOGPROBS, INPUTS, with_gradient=True)
    leaf = LOGPROBS.clone().requires_grad_()
    tensors = [torch.from_numpy(INPUTS[n]).reshape([-1] if r else []) for n, r in ranks.items()]
    expected, expected_metrics = loss(leaf, *tensors)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics == {name: float(metric.detach()) for name, metric in expected_metrics.items()}


def test_without_a_gradient_only_the_value_is_computed() -> None:
    text = uploaded(scaled, logprobs=1, scale=0)
    value, gradient, _ = loss_and_gradient(text, LOGPROBS, INPUTS, with_gradient=False)
    assert float(value) == pytest.approx(float((LOGPROBS * 0.5).sum() ** 2))
    assert not gradient.any()


def test_logprobs_of_several_targets() -> None:
    def loss(logprobs: Tensor, teacher: Tensor):
        return -(teacher * logprobs).sum(-1).mean(), {}

    text = uploaded(loss, logprobs=2, teacher=2)
    logprobs, teacher = torch.randn(3, 4), torch.rand(3, 4)
    _, gradient, _ = loss_and_gradient(
        text, logprobs, {"teacher": teacher.numpy()}, with_gradient=True
    )
    torch.testing.assert_close(gradient, -teacher / 3)


def test_a_loss_cannot_change_its_inputs() -> None:
    inputs = {"advantages": ADVANTAGES.copy()}

    def loss(logprobs: Tensor, advantages: Tensor):
        return (logprobs * F.relu(advantages, inplace=True)).sum(), {}

    text = uploaded(loss, logprobs=1, advantages=1)
    loss_and_gradient(text, LOGPROBS, inputs, with_gradient=True)
    np.testing.assert_array_equal(inputs["advantages"], ADVANTAGES)


def test_every_name_has_an_operation_and_every_operation_a_name() -> None:
    assert set(FUNCTION_TABLE) == FUNCTIONS
    assert set(METHOD_TABLE) == METHODS


def test_functions_stand_under_the_names_that_torch_fx_records() -> None:
    from torch.fx.node import _get_qualified_name

    for name, function in TORCH_FUNCTIONS.items():
        assert _get_qualified_name(function) == name


def test_nothing_in_place_random_or_executable_is_offered() -> None:
    words = ("rand", "dropout", "load", "save", "eval", "tolist", "numpy", "apply", "hook")
    for name in FUNCTIONS | METHODS:
        last = name.rpartition(".")[2]
        assert not last.endswith("_") or last in ("and_", "or_"), name
        assert not any(word in last for word in words), name


# hostile graphs, written by hand


def graph(*calls: dict[str, Any], result: str = "r") -> str:
    """The loss is the sum of the node `result`."""
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        *({"args": [], "kwargs": {}, **call} for call in calls),
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": result}]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
        },
    ]
    inputs = [{"name": "logprobs", "rank": 1}]
    return json.dumps({"name": "evil", "inputs": inputs, "graph": {"format": 1, "nodes": nodes}})


def function(target: str, *args: Any, name: str = "r", **kwargs: Any) -> dict[str, Any]:
    node = {"op": "call_function", "name": name, "target": target}
    return node | {"args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, name: str = "r", **kwargs: Any) -> dict[str, Any]:
    return function(target, *args, name=name, **kwargs) | {"op": "call_method"}


X = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (function("builtins.eval", "1"), "builtins.eval"),
        (function("os.system", "true"), "os.system"),
        (function("torch.load", "x"), "torch.load"),
        (function("torch.hub.load", "x"), "torch.hub.load"),
        (function("operator.attrgetter", "__class__"), "operator.attrgetter"),
        (function("operator.setitem", X, 0, 1.0), "operator.setitem"),
        (function("torch.rand_like", X), "torch.rand_like"),
        (function("torch.from_file", "x"), "torch.from_file"),
        (function("getattr", X, "__class__"), "getattr"),
        (function("getattr", X, "grad_fn"), "getattr"),
        (function("getattr", X, X), "getattr"),
        (method("__reduce__", X), "__reduce__"),
        (method("numpy", X), "numpy"),
        (method("register_hook", X), "register_hook"),
        (method("add_", X, 1.0), "add_"),
        ({"op": "get_attr", "name": "r", "target": "_tensor_constant0"}, "get_attr"),
        ({"op": "call_module", "name": "r", "target": "linear"}, "call_module"),
        (function("torch.add", X, 1.0, out=X), "out"),
        (function("torch.add", X, {"ref": "later"}), "later"),
        (function("torch.add", X, {"ref": "r"}), "'r'"),
        (function("torch.add", X, {"__class__": "x"}), "__class__"),
        (function("torch.add", X, {"dtype": "__class__"}), "dtype"),
        (function("torch.add", X, 10**30), "64 bits"),
    ],
    ids=lambda case: case["target"] if isinstance(case, dict) else "",
)
def test_a_hostile_node_is_refused_by_its_name_before_it_runs(
    call: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        parse(graph(call))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_deep_and_large_graphs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested"):
        parse(graph(function("torch.stack", nested(50))))
    with pytest.raises(InvalidRequest, match="arguments"):
        parse(graph(function("torch.stack", [0] * 30_000)))
    many = [function("torch.neg", X, name=f"n{i}") for i in range(MAX_NODES)]
    with pytest.raises(InvalidRequest, match="nodes"):
        parse(graph(*many, result="n0"))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"name": "x", "inputs": [], "graph": {}}',
        '{"name": "x", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 2}}',
        '{"name": "x", "inputs": [{"name": "logprobs", "rank": 0}], "graph": {"format": 1}}',
        '{"name": "x", "inputs": [7], "graph": {"format": 1, "nodes": []}}',
        '{"name": "x", "inputs": [{"name": "logprobs", "rank": 1}],'
        ' "graph": {"format": 1, "nodes": [7]}}',
        '{"name": "x", "inputs": [{"name": "logprobs", "rank": 1}],'
        ' "graph": {"format": 1, "nodes": []}}',
    ],
)
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What earlier tests left in this process is not looked through meanwhile."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "call",
    [
        method("expand", {"ref": "column"}, 4, 10**9),
        method("repeat", X, 10**9),
        function("torch.tile", X, {"tuple": [10**9]}),
        function("torch.zeros", 10**9),
        function("torch.full", {"tuple": [10**6, 10**6]}, 1.0),
        function("torch.full", {"tuple": [10**9]}, 1.0, device={"device": "cuda:0"}),
        function("torch.arange", 10**12),
        function("torch.eye", 10**6),
        function("torch.nn.functional.pad", X, [0, 10**9]),
        method("new_zeros", X, 10**9),
        function("torch.linspace", 0, 1, 10**9),
        method("repeat_interleave", X, 10**9),
        function("operator.pow", 10**9, 10**9),
        function("operator.mul", [0], 10**9),
        function("operator.mul", "x", 10**9),
        function("operator.mod", "%0999999999d", 1),
        function("operator.getitem", X, {"tuple": [None] * 100}),
        function("math.exp", X),
        function("torch.norm", X, "nuc"),
        function("torch.functional.norm", X, "nuc"),
        method("gather", X, 0, X),
        method("view", X, 3),
        method("to", X, "sparse"),
        method("sum"),
        function("getattr", 3, "shape"),
    ],
    ids=lambda call: call["target"],
)
@pytest.mark.usefixtures("uncollected")
def test_a_bomb_is_refused_by_its_node_and_takes_neither_memory_nor_time(
    call: dict[str, Any],
) -> None:
    column = method("unsqueeze", X, 1, name="column")
    torch.linspace(0, 1, 4, device="meta")  # imports what shape rules need (sympy): seconds, once
    began = time.thread_time()  # clients of earlier tests have threads
    with pytest.raises(UserError, match=r"'r'|torch\.norm"):
        loss_and_gradient(graph(column, call), LOGPROBS, {}, with_gradient=True)
    assert time.thread_time() - began < 5


def test_tensors_made_of_numbers_are_bounded_where_torch_does_not_know_their_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a process whose first `with torch.device(...)` was transformers' loading of a model.
    assert {f"torch.{f.__name__}" for f in _device_constructors()} & set(FUNCTION_TABLE) <= CREATING
    monkeypatch.setattr("torch.utils._device._device_constructors", set)
    for call in (
        function("torch.arange", 2**25),
        function("torch.eye", 2**13),
        function("torch.full", {"tuple": [2**25]}, 1.0),
        function("torch.linspace", 0, 1, 2**25),
        function("torch.ones", 2**25),
        function("torch.zeros", 2**25, device={"device": "cuda:0"}),
    ):
        made: list[torch.Tensor] = []
        plain = FUNCTION_TABLE[call["target"]]

        def kept(*args: Any, plain: Any = plain, made: Any = made, **kwargs: Any) -> torch.Tensor:
            made.append(plain(*args, **kwargs))
            return made[-1]

        monkeypatch.setitem(FUNCTION_TABLE, call["target"], kept)
        with pytest.raises(UserError, match=r"'r'.*elements"):
            loss_and_gradient(graph(call), LOGPROBS, {}, with_gradient=True)
        assert [tensor.device.type for tensor in made] == ["meta"]


def test_many_middling_tensors_are_refused_together() -> None:
    calls = [method("repeat", X, 2**21, name="r")]
    calls += [function("torch.neg", {"ref": "r"}, name=f"n{i}") for i in range(9)]
    with pytest.raises(UserError, match="elements"):
        loss_and_gradient(graph(*calls), LOGPROBS, {}, with_gradient=True)


def test_a_product_that_takes_too_long_is_refused() -> None:
    square = method("expand", {"ref": "row"}, 4096, 4096, name="square")
    row = method("repeat", {"ref": "logprobs"}, 1024, name="row")
    product = function("torch.matmul", {"ref": "square"}, {"ref": "square"})
    with pytest.raises(UserError, match="steps"):
        loss_and_gradient(graph(row, square, product), LOGPROBS, {}, with_gradient=True)


def test_an_index_that_is_out_of_range_is_an_error_and_no_crash() -> None:
    far = function("operator.getitem", X, 99)
    with pytest.raises(UserError, match="'r'"):
        loss_and_gradient(graph(far), LOGPROBS, {}, with_gradient=True)


def test_a_loss_without_gradient_or_not_scalar_is_refused() -> None:
    with pytest.raises(UserError, match="does not depend on logprobs"):
        loss_and_gradient(graph(method("detach", X)), LOGPROBS, {}, with_gradient=True)

    def vector(logprobs: Tensor):
        return logprobs * 2, {}

    with pytest.raises(UserError, match="scalar"):
        loss_and_gradient(uploaded(vector, logprobs=1), LOGPROBS, {}, with_gradient=True)


def test_infinite_constants_travel() -> None:
    def loss(logprobs: Tensor):
        return torch.nan_to_num(logprobs, nan=0.0, posinf=math.inf, neginf=-math.inf).sum(), {}

    value, _, _ = loss_and_gradient(uploaded(loss, logprobs=1), LOGPROBS, {}, with_gradient=True)
    assert float(value) == pytest.approx(float(LOGPROBS.sum()))
