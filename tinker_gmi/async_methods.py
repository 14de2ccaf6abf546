"""The `_async` twin of a method, derived from the method.

A client writes each operation once, as the method for synchronous callers. The twin takes the same
parameters; type checkers, `inspect.signature` and `help` see them:

    def sample(self, prompt: ModelInput, ...) -> APIFuture[SampleResponse]: ...

    sample_async = async_result(sample)
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from tinker_gmi.connection.futures import APIFuture

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def async_call(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """A coroutine method that returns what `method` returns; `method` must not block."""

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _bound(method, self)(*args, **kwargs)

    return _described(twin, method, method.__annotations__["return"])


def async_result(
    method: Callable[Concatenate[S, P], APIFuture[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """A coroutine method that awaits the future that `method` returns."""

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await _bound(method, self)(*args, **kwargs)

    (result,) = get_args(method.__annotations__["return"])
    return _described(twin, method, result)


def _bound(method: Callable[Concatenate[S, P], R], instance: S) -> Callable[P, R]:
    # By its name: where a subclass overrides the method, the twin calls the override.
    return getattr(instance, method.__name__)


def _described(
    twin: Callable[Concatenate[S, P], R], method: Callable[..., Any], result: Any
) -> Callable[Concatenate[S, P], R]:
    """The twin with the name, documentation and parameters of the method."""
    functools.update_wrapper(twin, method)
    twin.__name__ += "_async"
    twin.__qualname__ += "_async"
    twin.__annotations__ = {**method.__annotations__, "return": result}
    # Beside __wrapped__, which would show the result type of the method.
    twin.__dict__["__signature__"] = inspect.signature(method).replace(return_annotation=result)
    return twin
