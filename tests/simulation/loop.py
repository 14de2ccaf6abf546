"""An event loop on a virtual clock. One generator picks which of several ready callbacks runs next.

When nothing is ready, time jumps to the next timer. Every callback belongs to a simulated process
(by its context); callbacks of a process that has ended never run.
"""

import asyncio
import heapq
import random
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any

STEP_S = 20e-6  # of virtual time, for each callback
MAX_LAST_AWAITS = 50  # of a task that is unwound
EPOCH_S = 1_700_000_000.0


class ProcessEnded(BaseException):
    """Unwinds whatever a process was doing when it ended."""


class Stuck(Exception):
    """Nothing is ready and no timer is set, or the simulation runs on for ever."""


@dataclass(eq=False)
class Process:
    """A simulated process: a server, an engine, a client. tasks: all that it began."""

    name: str
    alive: bool = True
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list, repr=False)

    def unwind(self) -> None:
        """End its tasks here and now, for the garbage collector must not: their last words come
        while nothing listens."""
        self.alive = False
        # Of calls that a task had made and not begun to await.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self._end_tasks()

    def _end_tasks(self) -> None:
        for task in self.unfinished():
            coroutine: Any = task.get_coro()
            for _ in range(MAX_LAST_AWAITS):
                try:
                    coroutine.throw(ProcessEnded())
                except BaseException:  # noqa: BLE001 - whatever it ends with
                    break

    def unfinished(self) -> list["asyncio.Task[Any]"]:
        return [task for task in self.tasks if not task.done()]


PROCESS: ContextVar[Process] = ContextVar("the simulated process that runs")


class Handle:
    """What the loop is to call; as asyncio's own, without what only debugging needs."""

    __slots__ = ("_when", "args", "callback", "context", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, when: float
    ):
        self.callback, self.args, self.context, self._when = callback, args, context, when
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when


class SimulatedLoop(asyncio.AbstractEventLoop):
    """choices: picks the next callback. in_order: the first one always, as a real loop does.

    before_step: called before each callback of a process. after_step: called after each step of a
    task.
    """

    def __init__(self, choices: random.Random, *, in_order: bool = False):
        self._choices = choices
        self._in_order = in_order
        self._ready: list[Handle] = []
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = count()
        self._threadsafe: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.now = 0.0
        self.num_steps = 0
        self.before_step: Callable[[Process], None] = lambda process: None
        self.after_step: Callable[[Process, asyncio.Task[Any]], None] | None = None
        self.problems: list[str] = []
        self._closed = False
        self._processes: dict[Process, None] = {}

    # ---- running

    def run(self, main: Coroutine[Any, Any, None], max_steps: int) -> None:
        """Until `main` has ended. Raises what it raises, and Stuck."""
        events._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                if self.num_steps > max_steps:
                    raise Stuck(f"more than {max_steps} callbacks")
                self._run_next()
            task.result()
        finally:
            events._set_running_loop(None)

    def _run_next(self) -> None:
        handle = self._next()
        if handle.is_cancelled:
            return
        process = handle.context.get(PROCESS)
        if process is not None:
            if not process.alive:
                return
            self.before_step(process)
            if not process.alive:
                return
        self.num_steps += 1
        self.now += STEP_S
        try:
            handle.context.run(handle.callback, *handle.args)
        except ProcessEnded:
            pass
        except Exception as error:  # noqa: BLE001 - as a loop does; a run with problems fails
            self.problems.append(f"{type(error).__name__} in a callback: {error}")
        if self.after_step is not None and process is not None:
            owner = getattr(handle.callback, "__self__", None)
            if isinstance(owner, asyncio.Task) and not owner.done():
                self.after_step(process, owner)

    def _next(self) -> Handle:
        while self._timers and (not self._ready or self._timers[0][0] <= self.now):
            when, _, handle = heapq.heappop(self._timers)
            if not handle.is_cancelled:
                self.now = max(self.now, when)
                self._ready.append(handle)
        ready = self._ready
        if not ready:
            raise Stuck("nothing is ready and no timer is set")
        if self._in_order or len(ready) == 1:
            return ready.pop(0)
        index = int(self._choices.random() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    # ---- what asyncio asks of a loop

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, copy_context() if context is None else context, self.now)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        handle = Handle(callback, args, copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        """From one thread they come in order, so each of these calls the first that is left."""
        self._threadsafe.append((callback, args))
        return self.call_soon(self._first_threadsafe, context=context)

    def _first_threadsafe(self) -> None:
        callback, args = self._threadsafe.pop(0)
        callback(*args)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        process = PROCESS.get(None) if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks.append(task)
            self._processes[process] = None
        return task

    def get_task_factory(self) -> None:
        return None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """What a thread would do is done at some later moment, at once."""
        future = self.create_future()

        def run() -> None:
            if future.done():  # its caller was cancelled before the thread began
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - for whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._choices.expovariate(1000.0), run)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def unwind(self) -> None:
        """End all that is left of every process."""
        for process in self._processes:
            process.unwind()

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks of processes that have ended are destroyed while pending: that is their end."""
        task = context.get("task") or context.get("future")
        if task is not None and isinstance(context.get("exception"), Exception):
            self.problems.append(f"{context['message']}: {context['exception']!r}")


def in_process(process: Process, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as that process: the tasks that it begins are the process's."""

    def call() -> Any:
        PROCESS.set(process)
        return function(*args)

    return copy_context().run(call)
