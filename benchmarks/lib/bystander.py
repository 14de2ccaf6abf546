"""A client that does little, and sees what others do to it: it asks for a short sample at fixed
times, whether the earlier ones have come or not, so that a stall counts as often as it should."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import PROTO, SDK_VERSION, text_prompt
from benchmarks.lib.wire_client import Refused, WireClient

PERIOD_S = 0.1
LITTLE = 0.2
"""Of the server's time at most, as long as nobody else is there: a bystander who asks for more than
half of it waits for its own samples."""
LIMIT_S = 120.0
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass
class Seen:
    """In seconds. whole_s: from when a sample was due until its result was here. poll_s: of a poll
    for a result that is there already."""

    whole_s: list[float] = field(default_factory=list)
    poll_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def whole_ms(self, share: float) -> float:
        return 1e3 * quantile(self.whole_s, share)

    def poll_ms(self, share: float) -> float:
        return 1e3 * quantile(self.poll_s, share)


class Bystander:
    def __init__(self, api: WireClient, sampler_id: str):
        self._api = api
        self._sampler_id = sampler_id
        self._numbers = count()
        self.period_s = PERIOD_S

    @classmethod
    async def connect(cls, url: str, api_key: str, base_model: str) -> "Bystander":
        api = WireClient(url, api_key)
        session = await api.post(
            "create_session", sdk_version=SDK_VERSION, tags=[], user_metadata={}
        )
        sampler = await api.post(
            "create_sampling_session",
            session_id=session["session_id"],
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        return cls(api, sampler["sampling_session_id"])

    async def sample(self) -> str:
        """The request id, once the result is here."""
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

    async def settle(self, num_samples: int) -> None:
        """Ask for so many one after another, and from then on so seldom that it is little."""
        took_s: list[float] = []
        for _ in range(num_samples):
            began = time.perf_counter()
            await self.sample()
            took_s.append(time.perf_counter() - began)
        self.period_s = max(PERIOD_S, quantile(took_s[num_samples // 2 :], 0.5) / LITTLE)

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
                request_id = await self.sample()
                seen.whole_s.append(time.perf_counter() - due)
                began = time.perf_counter()
                await self._api.retrieve(request_id, PROTO)
                seen.poll_s.append(time.perf_counter() - began)
        except (Refused, OSError, TimeoutError) as error:
            seen.failures.append(repr(error))

    def close(self) -> None:
        self._api.close()
