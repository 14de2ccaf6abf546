"""A client that does little, and sees what others do to it: it asks for something short at fixed
times, whether the earlier ones have come or not, so that a stall counts as often as it should."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf

from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import PROTO, SDK_VERSION, text_prompt
from benchmarks.lib.training_http import forward_backward_body
from benchmarks.lib.wire_client import Refused, WireClient

PERIOD_S = 0.1
LITTLE = 0.2
"""Of the server's time at most, as long as nobody else is there: a bystander who asks for more than
half of it waits for its own samples."""
CALM = 1.5
LIMIT_S = 120.0
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass
class Seen:
    """In seconds. whole_s: from when it was due until its result was here. poll_s: of a poll
    for a result that is there already."""

    whole_s: list[float] = field(default_factory=list)
    poll_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def whole_ms(self, share: float) -> float:
        return 1e3 * quantile(self.whole_s, share)

    def poll_ms(self, share: float) -> float:
        return 1e3 * quantile(self.poll_s, share)


class Bystander(ABC):
    """period_s: from one request to the next. alone_s: that one takes where nobody else is."""

    def __init__(self, api: WireClient):
        self._api = api
        self.period_s = PERIOD_S
        self.alone_s = inf

    @abstractmethod
    async def ask(self) -> str:
        """The request id, once the result is here."""

    async def settle(self, num_samples: int) -> None:
        """Ask for so many one after another, and from then on so seldom that it is little."""
        took_s = [await self._time_s() for _ in range(num_samples)]
        self.alone_s = quantile(took_s[num_samples // 2 :], 0.5)
        self.period_s = max(PERIOD_S, self.alone_s / LITTLE)

    async def wait_for_calm(self, limit_s: float) -> None:
        """Until a request takes about as long as one did alone, or for so many seconds: what an
        attack leaves is not the next one's."""
        until = time.perf_counter() + limit_s
        took_s = inf
        while took_s > CALM * self.alone_s and time.perf_counter() < until:
            took_s = await self._time_s()

    async def _time_s(self) -> float:
        began = time.perf_counter()
        await self.ask()
        return time.perf_counter() - began

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[Seen]:
        """What it sees until the block ends, and of what it had asked for by then."""
        seen = Seen()
        asked: list[asyncio.Task[None]] = []

        async def ask() -> None:
            due = time.perf_counter()
            while True:
                asked.append(asyncio.create_task(self._ask(due, seen)))
                due += self.period_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

        asking = asyncio.create_task(ask())
        try:
            yield seen
        finally:
            asking.cancel()
            await asyncio.gather(asking, *asked, return_exceptions=True)

    async def _ask(self, due: float, seen: Seen) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                request_id = await self.ask()
                seen.whole_s.append(time.perf_counter() - due)
                began = time.perf_counter()
                await self._api.retrieve(request_id, PROTO)
                seen.poll_s.append(time.perf_counter() - began)
        except (Refused, OSError, TimeoutError) as error:
            seen.failures.append(repr(error))

    def close(self) -> None:
        self._api.close()


class SamplingBystander(Bystander):
    def __init__(self, api: WireClient, sampler_id: str):
        super().__init__(api)
        self._sampler_id = sampler_id
        self._numbers = count()

    @classmethod
    async def connect(cls, url: str, api_key: str, base_model: str) -> "SamplingBystander":
        api = WireClient(url, api_key)
        sampler = await api.post(
            "create_sampling_session",
            session_id=await _session(api),
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        return cls(api, sampler["sampling_session_id"])

    async def ask(self) -> str:
        seq_id = next(self._numbers)
        submitted = await self._api.post(
            "asample",
            sampling_session_id=self._sampler_id,
            seq_id=seq_id,
            num_samples=1,
            prompt=text_prompt(PROMPT),
            sampling_params={"max_tokens": 4, "seed": seq_id, "temperature": 1.0},
        )
        await self._api.retrieve(submitted["request_id"], PROTO)
        return submitted["request_id"]


class TrainingBystander(Bystander):
    """Asks for a forward_backward of one short datum."""

    def __init__(self, api: WireClient, model_id: str):
        super().__init__(api)
        self._model_id = model_id
        self._numbers = count(1)
        self._order = asyncio.Lock()  # numbers arrive in order

    @classmethod
    async def connect(cls, url: str, api_key: str, base_model: str) -> "TrainingBystander":
        api = WireClient(url, api_key)
        model = await api.result(
            "create_model",
            session_id=await _session(api),
            base_model=base_model,
            model_seq_id=0,
            lora_config={"rank": 8},
        )
        return cls(api, model["model_id"])

    async def ask(self) -> str:
        async with self._order:
            body = forward_backward_body(self._model_id, next(self._numbers), 1, len(PROMPT))
            answer = await self._api.call("/api/v1/forward_backward", body, PROTO)
            if answer.status != 200:
                raise Refused(answer)
        request_id = answer.json()["request_id"]
        await self._api.retrieve(request_id, PROTO)
        return request_id


async def _session(api: WireClient) -> str:
    made = await api.post("create_session", sdk_version=SDK_VERSION, tags=[], user_metadata={})
    return made["session_id"]
