"""One long poll for all samples of a client, where the server asks for it (specification 4.5)."""

import asyncio
import json
import time

from tinker_gmi.bodies.requests import FuturesRetrieveRequest, SamplingSessionFuturesTarget
from tinker_gmi.bodies.responses import FuturesRetrieveResponse
from tinker_gmi.connection.errors import APIError
from tinker_gmi.connection.polling import POLL_TIMEOUT_S
from tinker_gmi.connection.transport import Call, Transport, decoder


class Completions:
    """Tells which samples have ended; their results are fetched one by one. Only for coroutines of
    the transport's event loop."""

    def __init__(self, transport: Transport, target: SamplingSessionFuturesTarget):
        self._transport = transport
        self._target = target
        self._cursor = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._ended: set[str] = set()  # before anybody waited
        self._fetched: set[str] = set()  # not reported yet: the server may forget them
        self._polling: asyncio.Task[None] | None = None

    async def wait(self, request_id: str) -> None:
        """Until the request has ended. Raises what ended the polls."""
        if request_id in self._ended:
            self._ended.discard(request_id)
            return
        self._waiting[request_id] = asyncio.get_running_loop().create_future()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_while_awaited())
        try:
            await self._waiting[request_id]
        finally:
            self._waiting.pop(request_id, None)

    def fetched(self, request_id: str) -> None:
        """The result has arrived: the next poll says so."""
        self._fetched.add(request_id)

    async def _poll_while_awaited(self) -> None:
        attempt = 0
        while self._waiting:
            start = time.monotonic()
            try:
                num_ended = await self._poll()
            except APIError as error:
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(error)
                return
            held = time.monotonic() - start >= self._transport.retry.quick_poll_s
            attempt = 0 if num_ended or held else attempt + 1
            if attempt:
                await asyncio.sleep(self._transport.retry.delay_s(attempt) / 10)
            else:
                await asyncio.sleep(0)  # those that were woken leave the table first

    async def _poll(self) -> int:
        """How many ended."""
        reported = sorted(self._fetched)
        body = FuturesRetrieveRequest(
            target=self._target, prev_cursor=self._cursor, retrieved_request_ids=reported
        )
        content = json.dumps(body.to_json_dict()).encode()
        call = Call("POST", "retrieve_futures", content, timeout_s=POLL_TIMEOUT_S)
        answer = decoder(FuturesRetrieveResponse)(await self._transport.send(call))
        self._fetched.difference_update(reported)
        self._cursor = answer.cursor
        for completion in answer.completions:
            future = self._waiting.get(completion.request_id)
            if future is None:
                self._ended.add(completion.request_id)
            elif not future.done():
                future.set_result(None)
        return len(answer.completions)
