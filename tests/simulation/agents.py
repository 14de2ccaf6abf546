"""Agents of a user: chats on OpenAI's and Anthropic's routes, in capture sessions and outside, and
what is read of these sessions. A request whose connection broke is sent again, as these clients
do; that is another answer."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.history import Captured, Chat, History
from tests.simulation.looks import links_of
from tests.simulation.network import Answer, Network, NetworkError, Sent
from tests.simulation.schedule import BASES, Step
from tests.simulation.tokenizer import LETTERS
from tinker_gmi.connection.transport import JSON

RETRIES_S = (0.5, 1.0, 4.0)
TIMEOUT_S = 60.0
FETCH_S = 3.0
HURRIES_S = (0.01, 0.05, 0.3, 2.0)
MAX_TOKENS = 3
MANY = 9
"""Of episodes; the service asks about eight at once."""
REWARDED_S = 6.0
WEBHOOK = "http://rewards.example/ask"


@dataclass(frozen=True, slots=True)
class Known:
    """What the user's scripts have made. names: of weights that can be sampled. samplers: those of
    them that are pinned to one version. runs: ids of models."""

    names: Sequence[str]
    samplers: Sequence[str]
    runs: Sequence[str]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer that was whole. turn_id: without the prefix of its API."""

    turn_id: str
    text: str


class Agent:
    """keys: of all users."""

    def __init__(self, user: str, network: Network, keys: Mapping[str, str], history: History):
        self._user = user
        self._network = network
        self._key = keys[user]
        self.keys = keys
        self._history = history
        self._captures: list[Captured] = []
        self._turns = asyncio.Lock()  # an agent waits for its answer before it goes on

    async def do(self, step: Step, known: Known) -> None:
        match step.kind:
            case "chat" if step.size == 3:
                run = known.runs[-1] if known.runs else "none"
                await self.fetch(PAGES[step.seed % len(PAGES)].format(run=run))
            case "chat":
                await self._chat(step, known)
            case "capture":
                await self._open(step, known)
            case "turn":
                await self._converse(step)
            case _:
                await self._look(step, known)

    # ---- chats

    async def _chat(self, step: Step, known: Known) -> None:
        """Of pinned weights with a seed, or in one of the other ways."""
        names = known.samplers if known.samplers and step.target % 2 else known.names
        name = names[step.seed % len(names)]
        letters = _letters(step.seed)
        messages = [{"role": "user", "content": letters}]
        way = WAYS[step.seed // 8 % len(WAYS)]
        told = await self._answer(way, "", name, messages, step)
        if told is not None and name in known.samplers and way in SEEDED:
            self._history.chats.append(Chat(self._user, name, letters, step.seed, told.text))

    async def _answer(
        self, way: str, place: str, name: str, messages: list[dict[str, str]], step: Step
    ) -> Told | None:
        """place: of a capture session, before the route."""
        body: dict[str, Any] = {"model": name, "max_tokens": MAX_TOKENS, "stream": "stream" in way}
        if way.endswith("left"):
            return await self._leave(way, body, messages, step)
        if way == "train draft":
            await self._send("POST", "/oai/api/v1/train_draft", {"model": name})
            return None
        if way.startswith("completions"):
            letters = messages[0]["content"]
            body |= {"prompt": [letters, letters[::-1]], "seed": step.seed}
            await self._send("POST", "/oai/api/v1/completions", body)
            return None
        if way == "verify":
            body |= {"prompt": messages[0]["content"], "drafted": [step.seed % 9], "seed": 1}
            await self._send("POST", "/oai/api/v1/verify", body)
            return None
        body["messages"] = messages
        if way == "count":
            await self._send("POST", f"{place}/anthropic/api/v1/messages/count_tokens", body)
            return None
        if way.startswith("openai"):
            body |= {"seed": step.seed, "n": step.size}
            answer = await self._send("POST", f"{place}/oai/api/v1/chat/completions", body)
            return None if answer is None else _told_by_openai(answer)
        answer = await self._send("POST", f"{place}/anthropic/api/v1/messages", body)
        return None if answer is None else _told_by_anthropic(answer)

    async def _leave(
        self, way: str, body: dict[str, Any], messages: list[dict[str, str]], step: Step
    ) -> None:
        """As somebody who asks for a stream and closes the window."""
        route = ROUTES[way.partition(" ")[0]]
        if way.startswith("completions"):
            letters = messages[0]["content"]
            body["prompt"] = [letters] * step.size
        else:
            body["messages"] = messages
        headers = {"x-api-key": self._key, "content-type": JSON, "accept": "*/*"}
        sent = Sent("POST", route, headers, json.dumps(body).encode())
        with suppress(NetworkError):
            await self._network.request(sent, HURRIES_S[step.target % len(HURRIES_S)])

    # ---- capture sessions

    async def _open(self, step: Step, known: Known) -> None:
        """Of a name, or of what a run publishes; with a webhook or without."""
        body: dict[str, Any] = {"model": known.names[step.seed % len(known.names)]}
        if known.runs and step.overwrite:
            body = {"follow": known.runs[step.seed % len(known.runs)]}
        if step.seed % 2 == 0:
            body |= {"webhook": WEBHOOK, "idle_s": 1.0}
        answer = await self._send("POST", "/api/v1/captures", body)
        if answer is not None:
            captured = Captured(json.loads(answer.body)["capture_id"], self._user)
            self._captures.append(captured)
            self._history.captures.append(captured)

    async def be_rewarded(self, step: Step, known: Known) -> None:
        """By a webhook, for episodes that were left open; some more than are asked about at
        once."""
        num_before = len(self._captures)
        await self._open(replace(step, seed=step.seed // 2 * 2), known)
        if len(self._captures) == num_before:
            return
        captured = self._captures[-1]
        for episode in range(MANY if step.size == 3 else step.size):
            await self._converse_in(
                captured, episode, replace(step, size=1, seed=step.seed + 8 * episode)
            )
        await asyncio.sleep(REWARDED_S * step.size)

    def _capture(self, step: Step) -> Captured | None:
        return self._captures[step.target % len(self._captures)] if self._captures else None

    async def _converse(self, step: Step) -> None:
        """An episode of so many turns."""
        captured = self._capture(step)
        if captured is not None:
            await self._converse_in(captured, step.seed % 3, step)

    async def _converse_in(self, captured: Captured, episode: int, step: Step) -> None:
        place = f"/captures/{captured.capture_id}/episodes/{episode}"
        messages: list[dict[str, str]] = []
        async with self._turns:
            for number in range(step.size + 1):
                messages.append({"role": "user", "content": _letters(step.seed + number)})
                way = CHATS[(step.seed // 8 + number) % len(CHATS)]
                told = await self._answer(way, place, BASES[0], messages, step)
                if told is None:
                    return
                captured.answers.append((told.turn_id, told.text))
                messages.append({"role": "assistant", "content": told.text})

    async def _look(self, step: Step, known: Known) -> None:
        captured = self._capture(step)
        if captured is None:
            return
        path = f"/api/v1/captures/{captured.capture_id}"
        match step.seed % 8:
            case 0:
                captured.may_be_gone = True
                answer = await self._send("DELETE", path)
                captured.is_gone = answer is not None
            case 1:
                await self._send("POST", f"{path}/close", {})
            case 2:
                await self._send("POST", f"{path}/close", {"episode": str(step.target % 3)})
            case 3:
                body = {"model": known.names[step.seed // 8 % len(known.names)]}
                await self._send("PATCH", path, body)
            case 4:
                await self._send("GET", f"{path}/trajectories")
            case 5:
                await self._send("GET", f"{path}/datums?loss=cross_entropy")
            case _:
                await self._reward(captured, path, step)

    async def _reward(self, captured: Captured, path: str, step: Step) -> None:
        body: dict[str, Any] = {"value": step.seed / 2**32, "key": str(step.seed)}
        if captured.answers:
            body["turn"] = captured.answers[step.seed % len(captured.answers)][0]
        answer = await self._send("POST", f"{path}/rewards", body)
        if answer is not None:
            captured.rewards[json.loads(answer.body)["target"], body["key"]] = body["value"]

    async def have_shared(self, path: str, owner: str) -> None:
        """By the owner of a checkpoint. path: of the API."""
        await self._send("POST", path, {}, self.keys[owner])

    async def fetch(self, path: str) -> None:
        """Once, and not longer than a few seconds: some answers have no end. Then what it links
        to."""
        headers = {"x-api-key": self._key, "accept": "*/*"}
        with suppress(NetworkError):
            answer = await self._network.request(Sent("GET", path, headers, b""), FETCH_S)
            for link in links_of(path, answer):
                await self.fetch(link)

    async def _send(
        self, method: str, path: str, body: object = None, key: str | None = None
    ) -> Answer | None:
        """None: refused, or given up. key: another one than its own."""
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"x-api-key": key or self._key, "content-type": JSON, "accept": "*/*"}
        for delay_s in RETRIES_S:
            try:
                sent = Sent(method, path, headers, content)
                answer = await self._network.request(sent, TIMEOUT_S)
            except NetworkError:
                pass
            else:
                if answer.status < 500 and answer.status not in (408, 409, 429):
                    return answer if answer.status < 300 else None
            await asyncio.sleep(delay_s)
        return None


ROUTES = {
    "openai": "/oai/api/v1/chat/completions",
    "anthropic": "/anthropic/api/v1/messages",
    "completions": "/oai/api/v1/completions",
}
CHATS = ("openai", "openai stream", "anthropic", "anthropic stream", "count")
LEFT = tuple(f"{name} stream left" for name in ROUTES)
WAYS = (*CHATS, "completions", "completions stream", "verify", "train draft", *LEFT)
PAGES = (
    "/readyz",
    "/health",
    "/metrics",
    "/sessions",
    "/oai/api/v1/models",
    f"/oai/api/v1/models/{BASES[0]}",
    "/anthropic/api/v1/models",
    "/console/samples",
    "/console/events",
    "/console/runs/{run}/events",
    "/console/runs/{run}/events",
)
SEEDED = ("openai", "openai stream")


def _letters(seed: int) -> str:
    choices = random.Random(f"{seed} letters")
    return "".join(choices.choice(LETTERS) for _ in range(choices.randint(1, 4)))


def _told_by_openai(answer: Answer) -> Told | None:
    if answer.content_type.startswith(JSON):
        value = json.loads(answer.body)
        return Told(_turn_id(value["id"]), value["choices"][0]["message"]["content"] or "")
    *events, done = _events(answer)
    if done != "[DONE]":
        return None
    values = [json.loads(event) for event in events]
    choices = [choice for value in values for choice in value["choices"]]
    text = "".join(c["delta"].get("content") or "" for c in choices if c["index"] == 0)
    return Told(_turn_id(values[0]["id"]), text)


def _told_by_anthropic(answer: Answer) -> Told | None:
    if answer.content_type.startswith(JSON):
        value = json.loads(answer.body)
        return Told(_turn_id(value["id"]), "".join(each["text"] for each in value["content"]))
    values = [json.loads(event) for event in _events(answer)]
    if values[-1]["type"] != "message_stop":
        return None
    deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    # A heartbeat may come before it.
    start = next(value for value in values if value["type"] == "message_start")
    return Told(_turn_id(start["message"]["id"]), text)


def _events(answer: Answer) -> list[str]:
    lines = answer.body.decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def _turn_id(name: str) -> str:
    return name.removeprefix("chatcmpl-").removeprefix("msg_")
