"""The proxy before a real vLLM: greedy answers are its own, samples follow its distribution.

Where vLLM is not installed (benchmarks/peers.md), all of it is skipped.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from scipy import stats

from benchmarks.lib.peers import PEERS, Unavailable
from benchmarks.peers.sampling_servers import CACHE_READ, Vllm
from tests.proxy.bench import alone_and_through
from tests.proxy.tasks import TASKS, text_of
from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.proxy.server_kinds import SERVER_KINDS
from tinkercloud.proxy.target import Target
from tinkercloud.proxy.upstream import Upstream, UpstreamAddress
from tinkercloud.proxy.verification import RoundRequest

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0, "max_tokens": 32}
EAGER = "--enforce-eager"  # else it compiles for minutes at its first start
START_S = 600.0
REPEATED = "one two three one two four one two"
ALONE, VERIFIED, TOGETHER = 2000, 120, 16
LEVEL, RARE = 1e-6, 5
"""The chance that the test of equal distributions fails; what is expected less often is counted as
one."""


@dataclass(frozen=True)
class Pair:
    alone: httpx.AsyncClient
    through: httpx.AsyncClient
    model: str

    async def ask(self, which: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        answer = await which.post(path, json={"model": self.model, **body})
        return answer.raise_for_status().json()


@asynccontextmanager
async def pair(folder: Path, scratch: Path, *flags: str) -> AsyncIterator[Pair]:
    try:
        server = await Vllm.start(PEERS, folder, "float32", scratch, EAGER, *flags, limit_s=START_S)
    except Unavailable as reason:
        pytest.skip(f"vLLM: {reason}")
    url = f"http://127.0.0.1:{server.port}/v1"
    try:
        async with alone_and_through(url, folder, most_drafted=32) as (alone, through):
            yield Pair(alone, through, str(folder))
    finally:
        await server.close()


@pytest.mark.parametrize(("kind", "flags"), [("vllm", ()), ("vllm-cached", CACHE_READ)])
async def test_answers_are_those_of_vllm_alone(
    smollm2_folder: Path, tmp_path: Path, kind: str, flags: Sequence[str]
) -> None:
    """Greedy ones character by character; others in distribution, and repeated by their seed."""
    async with pair(smollm2_folder, tmp_path, *flags) as both:
        for name, (path, body) in TASKS.items():
            await compare_greedy(both, name, path, body | GREEDY)
        seeded = {"prompt": REPEATED, "temperature": 1, "seed": 5, "max_tokens": 16}
        first, second = [await both.ask(both.through, "completions", seeded) for _ in range(2)]
        assert text_of(first) == text_of(second)
        status = (await both.through.get("http://proxy/status")).json()
        assert status["speculation"]["verified_by"] == kind
        assert status["speculation"]["accepted"] > 0, status
        assert status["requests"]["passed_on"] == {}
        assert status["requests"]["failed"] == 0
        server = Upstream(UpstreamAddress.parse(str(both.alone.base_url)), both.alone, both.model)
        assert await p_value(both, server, kind) > LEVEL


# ---- greedy


async def compare_greedy(both: Pair, name: str, path: str, body: dict[str, Any]) -> None:
    """A difference counts where the two likeliest tokens are further apart than the same token's
    log-probability is between batches of other sizes."""
    alone, through = [await both.ask(client, path, body) for client in (both.alone, both.through)]
    if text_of(through) == text_of(alone):
        assert through["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"], name
        assert through["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"], name
        return
    scored = await both.ask(both.alone, path, body | scores_of(path))
    gap = gap_at_difference(scored, text_of(through))
    deviation = await own_deviation(both, scored)
    assert gap <= deviation, (name, gap, deviation, text_of(alone), text_of(through))


def scores_of(path: str) -> dict[str, Any]:
    wanted = {"return_token_ids": True}
    if path == "completions":
        return wanted | {"logprobs": 2}
    return wanted | {"logprobs": True, "top_logprobs": 2}


def places(answer: dict[str, Any]) -> list[tuple[str, float, list[float]]]:
    """Of each sampled token its text, its log-probability and those of the likeliest two."""
    found = answer["choices"][0]["logprobs"]
    if "content" in found:
        return [
            (each["token"], each["logprob"], [top["logprob"] for top in each["top_logprobs"]])
            for each in found["content"]
        ]
    tops = [list(top.values()) for top in found["top_logprobs"]]
    return list(zip(found["tokens"], found["token_logprobs"], tops, strict=True))


def gap_at_difference(scored: dict[str, Any], text: str) -> float:
    said = ""
    for token, _, tops in places(scored):
        said += token
        if not text.startswith(said):
            best, second = sorted(tops, reverse=True)[:2]
            return best - second
    return 0.0  # one text is the beginning of the other: an end against a token, not seen here


async def own_deviation(both: Pair, scored: dict[str, Any]) -> float:
    """Between tokens that were sampled one by one, and the same ones as parts of a prompt."""
    choice = scored["choices"][0]
    prompt = choice.get("prompt_token_ids") or scored["prompt_token_ids"]
    tokens = choice["token_ids"]
    body = {"prompt": [*prompt, *tokens], "max_tokens": 1, "prompt_logprobs": 0}
    answer = await both.ask(both.alone, "completions", body)
    rows = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
    again = [row[str(token)]["logprob"] for row, token in zip(rows, tokens, strict=True)]
    own = [logprob for _, logprob, _ in places(scored)]
    return max(abs(one - other) for one, other in zip(own, again, strict=True))


# ---- at temperature 1


async def p_value(both: Pair, server: Upstream, kind: str) -> float:
    """That a token has one distribution where it is sampled alone and where a draft of the
    likeliest is verified. Rounds are made here: the proxy leaves them out where they cost more than
    they bring."""
    body = {"prompt": REPEATED, "temperature": 1, "max_tokens": 1, "return_token_ids": True}
    drawn = await both.ask(both.alone, "completions", body | {"n": ALONE, "seed": 1})
    alone = [choice["token_ids"][0] for choice in drawn["choices"]]
    likeliest, num = Counter(alone).most_common(1)[0]
    assert 0.05 < num / ALONE < 0.95  # else hardly anything is accepted, or rejected
    prompt = tuple(drawn["choices"][0]["prompt_token_ids"])
    request = RoundRequest(prompt, (likeliest,), SamplingOptions(temperature=1.0))
    target = Target(server, SERVER_KINDS[kind], lambda token: True)
    room = asyncio.Semaphore(TOGETHER)

    async def verified(seed: int) -> int:
        async with room:
            return (await target.verify(request, random.Random(seed))).tokens[0]

    return chi_square(alone, await asyncio.gather(*map(verified, range(VERIFIED))))


def chi_square(alone: Sequence[int], verified: Sequence[int]) -> float:
    counts = [Counter(alone), Counter(verified)]
    enough = RARE * (1 + len(alone) / len(verified))
    kinds = [token for token in counts[0] | counts[1] if sum(c[token] for c in counts) >= enough]
    rows = [[count[token] for token in kinds] for count in counts]
    rest = [len(tokens) - sum(row) for tokens, row in zip((alone, verified), rows, strict=True)]
    table = [[*row, other] for row, other in zip(rows, rest, strict=True)]
    assert len(kinds) >= 3
    return float(stats.chi2_contingency(table).pvalue)
