"""How two kinds of clients repeat what fails: the official SDK, as the wire specification has it
(sections 4.4 and 5), and `tinker_gmi` by its own code."""

import asyncio
import json
from dataclasses import replace
from typing import Any, Protocol

import httpx

from tests.simulation.history import NUMBERS_OF_A_TRY, Result
from tests.simulation.network import Answer, HttpxTransport, Network, NetworkError, Sent
from tinker_gmi.connection.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    RequestFailedError,
)
from tinker_gmi.connection.polling import Poll, retrieve
from tinker_gmi.connection.retries import RetryPolicy
from tinker_gmi.connection.transport import JSON, PROTOBUF, Call, Transport

POST_TIMEOUT_S = 60.0
POLL_TIMEOUT_S = 45.0
BUSY_POLL_S = 0.01  # the SDK has none, and turns in a loop where a server answers at once


class Refused(Exception):
    """status: of an answer that is not tried again; 0: no answer within the client's patience."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{status}: {text}")
        self.status = status


class Wire(Protocol):
    async def post(self, path: str, content: bytes, content_type: str = JSON) -> dict[str, Any]:
        """Raises Refused."""
        ...

    async def get(self, path: str) -> dict[str, Any]: ...

    async def delete(self, path: str) -> None:
        """Raises Refused."""
        ...

    async def put(self, path: str, content: bytes) -> None:
        """Raises Refused."""
        ...

    async def result(self, request_id: str) -> Result:
        """Raises Refused."""
        ...


def result_of(answer: Answer) -> Result:
    if answer.content_type.startswith(JSON):
        value = json.loads(answer.body)
        if "error" in value:
            return ("failed", value["category"], value["error"].encode())
    return ("completed", answer.content_type, answer.body)


class SdkWire:
    """give_up_s: how long a POST is tried."""

    def __init__(self, network: Network, key: str, give_up_s: float):
        self._network = network
        self._key = key
        self._give_up_s = give_up_s

    async def _send(self, sent: Sent, timeout_s: float) -> Answer:
        return await self._network.request(sent, timeout_s)

    def _sent(self, method: str, path: str, content: bytes = b"", kind: str = JSON) -> Sent:
        headers = {"x-api-key": self._key, "content-type": kind, "accept": "*/*"}
        return Sent(method, f"/api/v1/{path}", headers, content)

    async def post(self, path: str, content: bytes, content_type: str = JSON) -> dict[str, Any]:
        return await self._patient(self._sent("POST", path, content, content_type))

    async def get(self, path: str) -> dict[str, Any]:
        return await self._patient(self._sent("GET", path))

    async def delete(self, path: str) -> None:
        await self._patient(self._sent("DELETE", path))

    async def put(self, path: str, content: bytes) -> None:
        await self._patient(self._sent("PUT", path, content))

    async def _patient(self, sent: Sent) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + self._give_up_s, 0.5
        while True:
            try:
                answer = await self._send(sent, POST_TIMEOUT_S)
            except NetworkError as error:
                status, text = 0, error.kind
            else:
                if answer.status in (200, 204):
                    return json.loads(answer.body or b"{}")
                status, text = answer.status, answer.body.decode()
                if status < 500 and status not in (408, 409, 429):
                    raise Refused(status, text)
            if loop.time() >= deadline:
                raise Refused(0, f"gave up after {status} {text}")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 10.0)
            sent = _counted_on(sent)

    async def result(self, request_id: str) -> Result:
        body = json.dumps({"request_id": request_id, "allow_metadata_only": True}).encode()
        sent, delay_s = self._sent("POST", "retrieve_future", body), 1.0
        while True:
            try:
                answer = await self._send(sent, POLL_TIMEOUT_S)
            except NetworkError:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, 30.0)
                continue
            if answer.status == 200:
                return result_of(answer)
            if answer.status != 408 and answer.status < 500:
                raise Refused(answer.status, answer.body.decode())
            delay_s = 1.0
            await asyncio.sleep(BUSY_POLL_S)


def _counted_on(sent: Sent) -> Sent:
    """The next try of a request. The official client takes another number for the sampler of a
    save at each try; here one that no other request of its session has."""
    if not sent.path.endswith("/save_weights_for_sampler"):
        return sent
    body = json.loads(sent.body)
    if "sampling_session_seq_id" in body:
        body["sampling_session_seq_id"] += NUMBERS_OF_A_TRY
    return replace(sent, body=json.dumps(body).encode())


class GmiWire:
    """`tinker_gmi.connection.transport.Transport` on the simulated network."""

    def __init__(self, network: Network, key: str, give_up_s: float):
        transport = HttpxTransport(network)
        retry = RetryPolicy(give_up_s=give_up_s)
        self._transport = Transport("http://server", key, "tinker_gmi", transport, retry)

    async def post(self, path: str, content: bytes, content_type: str = JSON) -> dict[str, Any]:
        return await self._sent(Call("POST", path, content, content_type=content_type))

    async def get(self, path: str) -> dict[str, Any]:
        return await self._sent(Call("GET", path))

    async def delete(self, path: str) -> None:
        await self._sent(Call("DELETE", path))

    async def put(self, path: str, content: bytes) -> None:
        await self._sent(Call("PUT", path, content))

    async def _sent(self, call: Call) -> dict[str, Any]:
        try:
            answer = await self._transport.send(call)
            return answer.json() if answer.content else {}
        except APIStatusError as error:
            given_up = error.status_code >= 500 or error.status_code in (408, 429)
            raise Refused(0 if given_up else error.status_code, str(error)) from None
        except APIError as error:
            raise Refused(0, str(error)) from None

    async def result(self, request_id: str) -> Result:
        def decode(response: httpx.Response) -> Result:
            return ("completed", response.headers["content-type"], response.content)

        try:
            return await retrieve(self._transport, Poll(request_id, protobuf=True), decode)
        except RequestFailedError as error:
            return ("failed", error.category, str(error.message).encode())
        except APIConnectionError as error:
            raise Refused(0, str(error)) from None
        except APIStatusError as error:
            given_up = error.status_code >= 500 or error.status_code == 429
            raise Refused(0 if given_up else error.status_code, str(error)) from None


__all__ = ["PROTOBUF", "GmiWire", "Refused", "SdkWire", "Wire", "result_of"]
