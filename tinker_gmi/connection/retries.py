"""How long to wait before a request is sent again, and when to give up."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tinker_gmi.connection.errors import APIConnectionError, APIStatusError

T = TypeVar("T")

HTTP_GONE = 410
MAX_RESUBMISSIONS = 5
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Delays double from `first_delay_s` to `max_delay_s`, less up to a quarter of jitter.

    After `give_up_s` seconds without a useful answer the last error is raised.
    quick_poll_s: the server did not hold a poll that it answered "pending" in less time; the next
    poll is then delayed, so that the client never polls in a busy loop. billing_pause_s: the wait
    after a 402, which pauses a job and ends it only after max_billing_pause_s.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    give_up_s: float = 300.0
    quick_poll_s: float = 1.0
    billing_pause_s: float = 5.0
    max_billing_pause_s: float = 3600.0

    def delay_s(self, attempt: int) -> float:
        """The delay before retry number `attempt`, counted from 0."""
        delay = min(self.first_delay_s * 2.0 ** min(attempt, 32), self.max_delay_s)
        return delay * random.uniform(0.75, 1.0)


def retry_after_s(response: httpx.Response) -> float:
    """How long the server asks to wait, at most a minute; 0 where it does not say."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            asked_s = float(response.headers.get(name, "")) * unit_s
        except ValueError:  # absent, or a date
            continue
        if 0 <= asked_s <= MAX_RETRY_AFTER_S:
            return asked_s
    return 0.0


@dataclass
class RetryConfig:
    """Retries of the samples of one client, by the official names.

    max_connections: samples that are underway at once; None: any number. progress_timeout: seconds
    in which no sample ended, after which all fail (unless enable_stuck_detection is off).
    enable_retry_logic False: the first failure is raised. A retry is a new request; delays double
    from retry_delay_base to retry_delay_max, give or take jitter_factor.
    """

    max_connections: int | None = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        asyncio.TimeoutError,
        APIConnectionError,
        httpx.TimeoutException,
    )

    def __post_init__(self) -> None:
        if self.progress_timeout <= 0:
            raise ValueError("progress_timeout must be positive")
        if self.max_connections is not None and self.max_connections <= 0:
            raise ValueError("max_connections must be positive, or None")
        if not 0 <= self.retry_delay_base <= self.retry_delay_max:
            raise ValueError("retry_delay_base must be between 0 and retry_delay_max")
        if not 0 <= self.jitter_factor <= 1:
            raise ValueError("jitter_factor must be between 0 and 1")


class SampleRetries:
    """Runs the samples of one client. config None: those that the server has lost are submitted
    again, and whatever the transport has given up on is raised."""

    def __init__(self, config: RetryConfig | None, max_concurrent: int | None = None):
        self._config = config
        limit = max_concurrent or (None if config is None else config.max_connections)
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        self._last_progress = time.monotonic()
        self._underway = 0

    async def run(self, submit: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._slots is None:
            return await self._run(submit)
        async with self._slots:
            return await self._run(submit)

    async def _run(self, submit: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._underway == 0:
            self._last_progress = time.monotonic()
        self._underway += 1
        try:
            result = await self._until_it_works(submit)
        finally:
            self._underway -= 1
        self._last_progress = time.monotonic()
        return result

    async def _until_it_works(self, submit: Callable[[], Coroutine[Any, Any, T]]) -> T:
        attempt = 0
        while True:
            try:
                return await self._unless_stuck(submit())
            except Exception as error:  # judged below; a cancellation is not an Exception
                if not self._worth_a_retry(error, attempt):
                    raise
            await asyncio.sleep(self._delay_s(attempt))
            attempt += 1

    async def _unless_stuck(self, sample: Coroutine[Any, Any, T]) -> T:
        config = self._config
        if config is None or not config.enable_stuck_detection:
            return await sample
        task = asyncio.ensure_future(sample)
        try:
            while True:
                left_s = self._last_progress + config.progress_timeout - time.monotonic()
                if left_s <= 0:
                    raise APIConnectionError(
                        f"no sample has ended in {config.progress_timeout:g} s: "
                        "requests appear to be stuck"
                    )
                done, _ = await asyncio.wait([task], timeout=left_s)
                if done:
                    return task.result()
        finally:
            task.cancel()

    def _worth_a_retry(self, error: Exception, attempt: int) -> bool:
        gone = isinstance(error, APIStatusError) and error.status_code == HTTP_GONE
        config = self._config
        if config is None:
            return gone and attempt < MAX_RESUBMISSIONS
        stuck = time.monotonic() - self._last_progress >= config.progress_timeout
        if not config.enable_retry_logic or (config.enable_stuck_detection and stuck):
            return False
        if isinstance(error, APIStatusError):
            return gone or error.status_code in (408, 409, 429) or error.status_code >= 500
        return isinstance(error, config.retryable_exceptions)

    def _delay_s(self, attempt: int) -> float:
        config = self._config
        if config is None:
            return 0.0
        delay_s = min(config.retry_delay_base * 2.0 ** min(attempt, 32), config.retry_delay_max)
        return delay_s * random.uniform(1 - config.jitter_factor, 1 + config.jitter_factor)
