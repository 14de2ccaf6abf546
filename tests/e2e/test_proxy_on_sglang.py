"""The proxy before a real SGLang on a CPU: greedy answers are its own, samples follow the model's
distribution, as transformers has it.

Where SGLang is not installed (`make test-cluster` does), all of it is skipped.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from benchmarks.lib.processes import ServerProcess, free_port
from tests.cluster.cpu.engines import ROOT, sglang_command, sglang_environment
from tests.proxy.bench import alone_and_through
from tests.proxy.tasks import TASKS, text_of
from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.chat.text_model import Conversation, TextModel
from tinkercloud.cluster.base_models import CPU_OPTIONS
from tinkercloud.core.types import ServedModel
from tinkercloud.proxy.server_kinds import SERVER_KINDS
from tinkercloud.proxy.target import Target
from tinkercloud.proxy.upstream import Upstream, UpstreamAddress
from tinkercloud.proxy.verification import RoundRequest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".venv-sglang/bin/python").exists(), reason="not installed: SGLang"
    ),
]
GREEDY = {"temperature": 0, "max_tokens": 24}
OPTIONS = (
    *("--dtype", "float32", "--context-length", "1024", "--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "8192", "--max-running-requests", "8", "--skip-server-warmup"),
)
START_S = 400.0
REPEATED = "one two three one two four one two"
VERIFIED, TOGETHER = 160, 8
LEVEL, RARE = 1e-6, 5
NEAR = 1e-3
"""Between log-probabilities of two tokens, either of which may be the likeliest in batches of other
sizes."""


@dataclass(frozen=True)
class Pair:
    alone: httpx.AsyncClient
    through: httpx.AsyncClient
    text: TextModel
    reference: Any

    async def ask(self, which: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        answer = await which.post(path, json={"model": "smollm2", **body})
        return answer.raise_for_status().json()

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Of each token of the vocabulary after these; transformers', float32."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([tokens])).logits[0, -1]
        return logits.double().log_softmax(-1).numpy()

    def prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return self.text.prompt(Conversation(tuple(body["messages"])))
        return self.text.codec.encode(body["prompt"], bos=True)


@asynccontextmanager
async def pair(folder: Path, scratch: Path) -> AsyncIterator[Pair]:
    port = free_port()
    server = ServerProcess(
        [
            *sglang_command(),
            *("--model-path", folder, "--served-model-name", "smollm2"),
            *("--host", "127.0.0.1", "--port", str(port), *CPU_OPTIONS, *OPTIONS),
        ],
        scratch / "sglang.log",
        sglang_environment(),
    )
    url = f"http://127.0.0.1:{port}/v1"
    text = TextModel.of(ServedModel("smollm2", "", 0, 0, 0, folder, (), "float32"))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        server.await_ready(f"http://127.0.0.1:{port}/health", START_S)
        async with alone_and_through(url, folder, most_drafted=16) as (alone, through):
            yield Pair(alone, through, text, reference)
    finally:
        server.stop()


async def test_answers_are_those_of_sglang_alone(smollm2_folder: Path, tmp_path: Path) -> None:
    """Greedy ones character by character; others in distribution."""
    async with pair(smollm2_folder, tmp_path) as both:
        for name, (path, body) in TASKS.items():
            await compare_greedy(both, name, path, body)
        drawn = {"prompt": REPEATED, "temperature": 1, "max_tokens": 16}
        answer = await both.ask(both.through, "completions", drawn)
        assert answer["usage"]["completion_tokens"] <= 16
        status = (await both.through.get("http://proxy/status")).json()
        assert status["speculation"]["verified_by"] == "sglang"
        assert status["speculation"]["accepted"] > 20, status
        assert status["requests"]["passed_on"] == {}
        assert status["requests"]["failed"] == 0
        assert await p_value(both) > LEVEL


async def compare_greedy(both: Pair, name: str, path: str, body: dict[str, Any]) -> None:
    """A difference counts where the two tokens are not nearly as likely for the reference."""
    alone, through = [
        await both.ask(client, path, body | GREEDY) for client in (both.alone, both.through)
    ]
    one, other = text_of(alone), text_of(through)
    if one == other:
        assert through["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"], name
        assert through["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"], name
        return
    ours, theirs = (both.text.codec.encode(text, bos=False) for text in (other, one))
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    assert place is not None, (name, one, other)
    logprobs = both.logprobs([*both.prompt(body), *theirs[:place]])
    assert abs(logprobs[ours[place]] - logprobs[theirs[place]]) < NEAR, (name, one, other)


async def p_value(both: Pair) -> float:
    """That verified tokens follow the reference's distribution, where a draft of the likeliest is
    verified. Rounds are made here: the proxy leaves them out where they cost more than they
    bring."""
    prompt = both.text.codec.encode(REPEATED, bos=True)
    chances = np.exp(both.logprobs(prompt))
    likeliest = int(chances.argmax())
    assert 0.05 < chances[likeliest] < 0.95  # else hardly anything is accepted, or rejected
    request = RoundRequest(tuple(prompt), (likeliest,), SamplingOptions(temperature=1.0))
    server = Upstream(UpstreamAddress.parse(str(both.alone.base_url)), both.alone, "smollm2")
    target = Target(server, SERVER_KINDS["sglang"], lambda token: True)
    room = asyncio.Semaphore(TOGETHER)

    async def verified(seed: int) -> int:
        async with room:
            return (await target.verify(request, random.Random(seed))).tokens[0]

    counts = Counter(await asyncio.gather(*map(verified, range(VERIFIED))))
    kinds = [int(token) for token in np.flatnonzero(chances * VERIFIED >= RARE)]
    assert len(kinds) >= 3
    observed = [counts[token] for token in kinds]
    expected = [VERIFIED * chances[token] for token in kinds]
    rest = VERIFIED - sum(observed), VERIFIED - sum(expected)
    return float(stats.chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue)
