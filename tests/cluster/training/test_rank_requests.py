"""Requests to ranks: each is one method of a rank, and goes to it with its fields."""

import inspect
import pickle
from dataclasses import fields

import pytest

from tests.embedded.tiny import supervised
from tinkercloud.cluster.training import rank_requests
from tinkercloud.cluster.training.rank_requests import (
    ForwardBackwardOnly,
    Load,
    RankRequest,
    TrainRank,
)
from tinkercloud.cluster.training.train_actor import packed_request
from tinkercloud.core.types import TrainBatch

REQUEST_TYPES = [
    value
    for value in vars(rank_requests).values()
    if inspect.isclass(value) and issubclass(value, RankRequest) and not inspect.isabstract(value)
]


class Recorder:
    """A rank that only notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_every_method_of_a_rank_has_a_request_type() -> None:
    methods = {name for name, _ in inspect.getmembers(TrainRank, inspect.isfunction)}
    methods = {name for name in methods if not name.startswith("_")}
    names = [request_type(*fields(request_type)).name for request_type in REQUEST_TYPES]
    assert len(names) == 13
    assert sorted(names) == sorted(methods)


@pytest.mark.parametrize("request_type", REQUEST_TYPES, ids=lambda kind: kind.__name__)
def test_a_request_calls_its_method_with_all_of_its_fields(request_type: type[RankRequest]) -> None:
    values = [object() for _ in fields(request_type)]
    request, rank = request_type(*values), Recorder()
    request.run(rank)
    ((name, args, kwargs),) = rank.calls
    assert name == request.name
    assert [*args, *kwargs.values()] == values


def test_a_request_in_pieces_is_the_request() -> None:
    batch = TrainBatch((supervised(40_000, 0),), "cross_entropy")
    pieces = packed_request(ForwardBackwardOnly("m", batch))
    assert len(pieces) > 1
    request = pickle.loads(b"".join(pieces))
    assert isinstance(request, ForwardBackwardOnly)
    assert (request.batch.data[0].tokens == batch.data[0].tokens).all()


def test_the_name_of_a_request_is_its_method() -> None:
    assert Load("m", None, with_optimizer=True).name == "load"
    assert ForwardBackwardOnly("m", None).name == "forward_backward_only"
