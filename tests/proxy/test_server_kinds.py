"""Answers of upstreams are input from outside: refused or read, never a crash."""

import random
from typing import Any

import pytest

from tests.proxy.scripted_server import ScriptedModel, ScriptedServer
from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import UpstreamAnswerInvalid
from tinkercloud.proxy.server_kinds import SERVER_KINDS
from tinkercloud.proxy.verification import RoundRequest, Scores

NUM_TOKENS = 7
STRANGE = (None, "x", -1, True, float("nan"), [], {}, [[]], [None], 10**30)


def answered(kind: str, drafted: tuple[int, ...]) -> tuple[RoundRequest, dict[str, Any]]:
    """A round, and a server's answer to it."""
    request = RoundRequest((3, 1), drafted, SamplingOptions(temperature=0.0))
    server, form = ScriptedServer(kind, ScriptedModel()), SERVER_KINDS[kind].verify
    reply = {
        "/generate": server.generate,
        "/inference/v1/generate": server.generate_cached,
        "verify": server.verify,
    }
    body = form.request(request) | {"model": "scripted"}
    return request, reply.get(form.path, server.completion)(body)


def damage(answer: Any, coins: random.Random) -> None:
    """Something in it replaced by something else, wherever that is."""
    node = answer
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = coins.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or coins.random() < 0.3:
            break
        node = node[key]
    node[key] = coins.choice(STRANGE)


@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_a_damaged_answer_is_refused_or_read_and_never_a_crash(kind: str) -> None:
    coins, num_refused = random.Random(kind), 0
    for _ in range(300):
        drafted = tuple(coins.randrange(NUM_TOKENS) for _ in range(3))
        request, answer = answered(kind, drafted)
        damage(answer, coins)
        try:
            read = SERVER_KINDS[kind].verify.read(request, answer)
        except UpstreamAnswerInvalid:
            num_refused += 1
        else:
            num = len(read.drafted) if isinstance(read, Scores) else len(read.tokens) - 1
            assert num <= len(drafted)
    assert num_refused > 50


@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_an_answer_about_other_tokens_is_refused(kind: str) -> None:
    own = ScriptedModel().alone((3, 1), 3)
    _, answer = answered(kind, tuple(own))
    others = tuple((token + 3) % NUM_TOKENS for token in own)
    request = RoundRequest((3, 1), others, SamplingOptions(temperature=0.0))
    with pytest.raises(UpstreamAnswerInvalid):
        SERVER_KINDS[kind].verify.read(request, answer)
