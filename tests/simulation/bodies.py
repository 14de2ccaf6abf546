"""Bodies of the numbered requests of clients, all from the seed of a step."""

import json
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tests.simulation.history import History, Request
from tests.simulation.schedule import VOCAB_SIZE, Step
from tests.simulation.wires import Refused, Wire
from tinker_gmi.connection.transport import JSON
from tinkercloud.core.types import ProvenanceSpan, RecordedSequence
from tinkercloud.losses.custom.graph import CUSTOM
from tinkercloud.wire.codec import (
    ForwardBackwardRequest,
    WireDatum,
    decode_sample_output,
    encode_forward_backward_request,
)

LATE_SEED = 1_000_001


async def draw_late(history: History, wire: Wire, user: str, sampler_id: str) -> None:
    """A seeded sample by a client that comes to rest: with a number that no other one has."""
    step = Step("sample", seed=LATE_SEED)
    request = sample_request(user, sampler_id, LATE_SEED, step)
    history.requests.append(request)
    acknowledgement = await wire.post(*request.post)
    request.request_ids.append(acknowledgement["request_id"])
    request.results.append(await wire.result(request.request_ids[0]))


async def take_number(history: History, wire: Wire, user: str, step: Step) -> None:
    """By mistake, of a step or a sample that has it: nothing comes of that."""
    others = {"optim_step": '"learning_rate": 9.5', "sample": '"max_tokens": 4'}
    known = [each for each in history.requests if each.user == user and each.is_acknowledged]
    taken = [each for each in known if each.kind in others and each.seq_id is not None]
    if taken:
        request = taken[step.seed % len(taken)]
        path, content, kind = request.post
        name, _, _ = others[request.kind].partition(":")
        other = re.sub(rf"{name}: [0-9.]+", others[request.kind], content.decode())
        with suppress(Refused):
            await wire.post(path, other.encode(), kind)


def sample_request(
    user: str, sampler_id: str, number: int | None, step: Step, **others: Any
) -> Request:
    """others: of its body, in place of what it has."""
    params: dict[str, Any] = {"max_tokens": 3, "temperature": 1.0, "stop": []}
    if step.seed % 5:
        params["seed"] = step.seed
    body: dict[str, Any] = {
        "sampling_session_id": sampler_id,
        "prompt": prompt_of([1 + step.seed % 20, 3, 5]),
        "sampling_params": params,
        "num_samples": step.size,
        "seq_id": number,
    }
    if step.seed % 7 == 0:
        body["record_stability_info"] = True
    body |= others
    request = Request(user, "sample", sampler_id, number, body)
    request.post = ("asample", json.dumps(body).encode(), JSON)
    return request


def batch(request: Request, numbers: random.Random, *, forward_only: bool) -> bytes:
    data = tuple(_datum(numbers) for _ in range(numbers.choice((1, 2))))
    wire = ForwardBackwardRequest(
        request.owner, request.seq_id or 0, data, "cross_entropy", forward_only=forward_only
    )
    return encode_forward_backward_request(wire)


def prompt_of(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def custom_loss(request: Request, loss_id: str) -> bytes:
    data = (_datum(random.Random(request.seq_id)),)
    return encode_forward_backward_request(
        ForwardBackwardRequest(
            request.owner, request.seq_id or 0, data, CUSTOM, {"loss_id": loss_id}
        )
    )


def record_batch(request: Request, sample: Request, numbers: random.Random) -> bytes:
    """To train on the first sequence of a sample that is on record."""
    sequence = decode_sample_output(sample.results[0][2]).sequences[0]
    name = f"{sample.request_ids[0]}:0"
    prompt = np.array(sample.body["prompt"]["chunks"][0]["tokens"], np.int32)
    record = RecordedSequence(prompt, sequence.tokens, sequence.logprobs)
    request.records = {name: record}
    tokens = np.concatenate([prompt, sequence.tokens]).astype(np.int32)
    num_prompt, num_sampled = len(prompt), len(sequence.tokens)
    advantages = np.zeros(len(tokens) - 1, np.float32)
    advantages[num_prompt - 1 :] = [numbers.random() for _ in range(num_sampled)]

    def spans(offset: int, num: int) -> tuple[ProvenanceSpan, ...]:
        of_prompt = ProvenanceSpan("prompt", name, offset, num_prompt - offset)
        return of_prompt, ProvenanceSpan("sampled", name, 0, num)

    inputs = {"target_tokens": tokens[1:].astype(np.int64), "advantages": advantages}
    datum = WireDatum((tokens[:-1],), inputs, spans(0, num_sampled - 1), spans(1, num_sampled))
    return encode_forward_backward_request(
        ForwardBackwardRequest(request.owner, request.seq_id or 0, (datum,), "stable_reinforce")
    )


def _datum(numbers: random.Random) -> WireDatum:
    length = numbers.randint(2, 5)
    highest = VOCAB_SIZE - 1 if numbers.random() < 0.97 else 10 * VOCAB_SIZE  # beyond: refused
    tokens = [numbers.randint(0, highest) for _ in range(length)]
    arrays = {
        "target_tokens": np.array([numbers.randrange(VOCAB_SIZE) for _ in tokens], np.int64),
        "weights": np.array([numbers.random() for _ in tokens], np.float32),
    }
    return WireDatum((np.array(tokens, np.int32),), arrays)
