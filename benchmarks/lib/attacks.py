"""What one key holder, or nobody's key, can do to a server: run as a module with the name of an
attack and a `Target` as JSON; it writes what the server answered.

All are bounded: in time, in requests and in bytes. All go to one server on this machine.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from benchmarks.lib.processes import give_way
from benchmarks.lib.tinker_http import SDK_VERSION, text_prompt
from benchmarks.lib.training_http import ADAM

CALL = "/api/v1/"
LIMIT_S = 30.0  # of one request
END_S = 5.0  # that answers are waited for when the time is up


@dataclass(frozen=True)
class Victim:
    """context: the longest prompt. scale: of the numbers of requests and bytes; 1: as found."""

    url: str
    api_key: str
    base_model: str
    context: int
    vocabulary: int
    seconds: float
    scale: float = 1.0

    def many(self, number: int) -> int:
        return max(1, round(number * self.scale))


class Attack:
    def __init__(self, victim: Victim):
        self.victim = victim
        self.answers: Counter[str] = Counter()
        self.deadline = time.monotonic() + victim.seconds
        limits = httpx.Limits(max_connections=64)
        self.http = httpx.AsyncClient(
            base_url=victim.url, timeout=LIMIT_S, limits=limits, trust_env=False
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.victim.api_key}

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.deadline

    async def post(self, call: str, body: object) -> dict[str, object]:
        """The answer, which is counted; {} where there is none."""
        return await self.send(call, json.dumps(body).encode())

    async def send(
        self, call: str, body: bytes, more: dict[str, str] | None = None
    ) -> dict[str, object]:
        headers = {**self.headers, "Content-Type": "application/json", **(more or {})}
        try:
            answer = await self.http.post(CALL + call, content=body, headers=headers)
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1
            return {}
        self.answers[_outcome(answer)] += 1
        try:
            return answer.json() if answer.is_success else {}
        except ValueError:
            return {}

    async def session(self) -> str:
        body = {"sdk_version": SDK_VERSION, "tags": [], "user_metadata": {}}
        return str((await self.post("create_session", body)).get("session_id", ""))

    async def sampler(self, session_id: str, number: int = 0) -> str:
        made = await self.post(
            "create_sampling_session",
            {
                "session_id": session_id,
                "sampling_session_seq_id": number,
                "base_model": self.victim.base_model,
            },
        )
        return str(made.get("sampling_session_id", ""))

    def sample(self, sampler_id: str, num_tokens: int, number: int, **more: object) -> object:
        prompt = [3 + (i * 7 + number) % 500 for i in range(num_tokens)]
        return {
            "sampling_session_id": sampler_id,
            "seq_id": number,
            "num_samples": 1,
            "prompt": text_prompt(prompt),
            "sampling_params": {"max_tokens": 4, "seed": number, "temperature": 1.0},
            **more,
        }

    async def retrieve(self, request_id: object) -> None:
        answer: dict[str, object] = {}
        while request_id and not answer:
            answer = await self.post("retrieve_future", {"request_id": request_id})
            if not self.goes_on:
                return

    async def model(self, rank: int) -> str:
        session_id = await self.session()
        lora = {"rank": rank}
        body = {"session_id": session_id, "base_model": self.victim.base_model, "model_seq_id": 0}
        made = await self.post("create_model", {**body, "lora_config": lora})
        await self.retrieve(made.get("request_id"))
        return f"{session_id}:train:0"

    async def parallel(self, number: int, work: Callable[[int], Awaitable[None]]) -> None:
        await asyncio.gather(*(work(i) for i in range(number)))

    async def hold(self) -> None:
        await asyncio.sleep(max(0.0, self.deadline - time.monotonic()))


def _outcome(answer: httpx.Response) -> str:
    """Status, and whether it is a failed result."""
    body = answer.content[:400]
    failed = answer.is_success and b'"error"' in body and b'"category"' in body
    return f"{answer.status_code}{' failed' if failed else ''}"


# ---- the attacks


async def large_topk(attack: Attack) -> None:
    """Answers with as many log-probabilities as the server gives, as JSON."""
    sampler_id = await attack.sampler(await attack.session())
    length = attack.victim.context - 8
    k = min(attack.victim.vocabulary, 2**24 // length)

    async def ask(worker: int) -> None:
        number = worker * 1000
        while attack.goes_on:
            body = attack.sample(sampler_id, length, number, topk_prompt_logprobs=k)
            number += 1
            made = await attack.post("asample", body)
            await attack.retrieve(made.get("request_id"))
            await asyncio.sleep(0.1)

    await attack.parallel(attack.victim.many(4), ask)


async def zstd_bombs(attack: Attack) -> None:
    """Bodies of some kB that inflate to a gigabyte."""
    import zstandard

    packer = zstandard.ZstdCompressor(level=3).compressobj()
    zeros = bytes(2**24)
    pieces = [packer.compress(zeros) for _ in range(attack.victim.many(64))]
    bomb = b"".join([*pieces, packer.flush()])

    async def throw(worker: int) -> None:
        while attack.goes_on:
            await attack.send("asample", bomb, {"Content-Encoding": "zstd"})
            await asyncio.sleep(0.1)

    await attack.parallel(2, throw)


async def half_open(attack: Attack) -> None:
    """Connections that send half of a head, and nothing more."""
    address = urlsplit(attack.victim.url)
    writers = []
    for _ in range(attack.victim.many(1500)):
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nX-")
        except OSError as error:
            attack.answers[type(error).__name__] += 1
            continue
        writers.append(writer)
        attack.answers["opened"] += 1
    await attack.hold()
    for writer in writers:
        writer.close()


async def long_prompts(attack: Attack) -> None:
    """Prompts of 8,000 tokens, or as long as the model takes, eight at a time."""
    sampler_id = await attack.sampler(await attack.session())
    length = min(8000, attack.victim.context - 8)

    async def ask(worker: int) -> None:
        number = worker * 1000
        while attack.goes_on:
            made = await attack.post("asample", attack.sample(sampler_id, length, number))
            number += 1
            await attack.retrieve(made.get("request_id"))
            await asyncio.sleep(0.01)

    await attack.parallel(attack.victim.many(8), ask)


async def queued_samples(attack: Attack) -> None:
    """10,000 samples that are asked for and never retrieved."""
    sampler_id = await attack.sampler(await attack.session())
    numbers = iter(range(attack.victim.many(10_000)))

    async def ask(_: int) -> None:
        for number in numbers:
            if not attack.goes_on:
                return
            await attack.post("asample", attack.sample(sampler_id, 64, number))

    await attack.parallel(32, ask)
    await attack.hold()


async def large_rank(attack: Attack) -> None:
    """A model of rank 1024, which takes a step."""
    model_id = await attack.model(attack.victim.many(1024))
    made = await attack.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": ADAM})
    await attack.retrieve(made.get("request_id"))
    await attack.hold()


async def bad_learning_rates(attack: Attack) -> None:
    """Steps whose learning rate is not a number, or too large for one."""
    model_id, number = await attack.model(8), 0
    while attack.goes_on or not number:  # on a slow machine the model takes all of its time
        for rate in (float("nan"), 1e308):
            number += 1
            adam = {**ADAM, "learning_rate": rate}
            made = await attack.post(
                "optim_step", {"model_id": model_id, "seq_id": number, "adam_params": adam}
            )
            await attack.retrieve(made.get("request_id"))
        await asyncio.sleep(0.05)


async def large_json(attack: Attack) -> None:
    """JSON bodies of 60 MB, four at a time."""
    body = b'{"prompt": {"chunks": [' + b"[]," * attack.victim.many(20_000_000) + b"[]]}}"

    async def send(_: int) -> None:
        while attack.goes_on:
            await attack.send("asample", body)
            await asyncio.sleep(0.1)

    await attack.parallel(4, send)


async def without_key(attack: Attack) -> None:
    """Bodies of 64 MB without a key, eight at a time."""
    body = bytes(attack.victim.many(64_000_000))

    async def send(_: int) -> None:
        while attack.goes_on:
            await attack.send("asample", body, {"X-API-Key": ""})
            await asyncio.sleep(0.05)

    await attack.parallel(8, send)


async def endless_sessions(attack: Attack) -> None:
    """A thousand sessions, each with a sampler, that are never heard of again."""
    numbers = iter(range(attack.victim.many(1000)))

    async def open_one(_: int) -> None:
        for _number in numbers:
            if not attack.goes_on:
                return
            await attack.sampler(await attack.session())

    await attack.parallel(16, open_one)
    await attack.hold()


LONG_PROMPTS, QUEUED_SAMPLES = "prompts of 8000 tokens", "10000 queued samples"
ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "large top-k answers": large_topk,
    "zstd bombs": zstd_bombs,
    "half-open connections": half_open,
    LONG_PROMPTS: long_prompts,
    QUEUED_SAMPLES: queued_samples,
    "a model of rank 1024": large_rank,
    "learning rates NaN and 1e308": bad_learning_rates,
    "JSON bodies of 60 MB": large_json,
    "bodies without a key": without_key,
    "sessions that never end": endless_sessions,
}


async def run(name: str, victim: Victim) -> str:
    attack = Attack(victim)
    try:
        async with asyncio.timeout(victim.seconds + END_S):
            await ATTACKS[name](attack)
    except TimeoutError:
        attack.answers["cut off"] = 1
    finally:
        await attack.http.aclose()
    return _told(attack.answers)


def _told(answers: Counter[str]) -> str:
    return ", ".join(f"{answer}: {number}" for answer, number in sorted(answers.items()))


def main(arguments: Sequence[str]) -> None:
    give_way()
    name, victim = arguments
    answers = asyncio.run(run(name, Victim(**json.loads(victim))))
    sys.stdout.write(f"{answers}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
