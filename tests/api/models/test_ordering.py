"""Training requests run once, in their order, however they arrive."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.api.harness import PROTOBUF, Api, body_of, serving, wire_datum
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.wire.codec import decode_train_output

STEPS = range(1, 13)


def request_for(model_id: str, seq_id: int) -> tuple[str, dict]:
    """Every third request a step, the others chunks that differ; (path, httpx arguments)."""
    if seq_id % 3 == 0:
        adam = {"learning_rate": 0.01 * seq_id}
        return "optim_step", {"json": {"model_id": model_id, "seq_id": seq_id, "adam_params": adam}}
    tokens = [seq_id, seq_id + 1, 3, 4]
    body = body_of(model_id, seq_id, [wire_datum(tokens)])
    return "forward_backward", {"content": body, "headers": PROTOBUF}


async def send(api: Api, model_id: str, seq_id: int) -> str:
    path, arguments = request_for(model_id, seq_id)
    response = await api.http.post(f"/api/v1/{path}", **arguments)
    assert response.status_code == 200, response.text
    return response.json()["request_id"]


async def final_state(api: Api, model_id: str) -> bytes:
    """The log-probabilities of a probe, to the last bit."""
    accepted = await api.forward_backward(
        model_id, STEPS.stop, [wire_datum(range(1, 30))], forward_only=True
    )
    output = await api.result(accepted)
    return output.outputs[0]["logprobs"].tobytes()


async def test_shuffled_and_repeated_delivery_gives_the_same_state(api: Api) -> None:
    plain, shuffled = await api.model(), await api.model()
    for seq_id in STEPS:
        await send(api, plain, seq_id)
    # as the client does: the chunks of one call and the step after it overtake each other
    numbers = random.Random(3)
    for start in STEPS[::3]:
        group = [start, start + 1, start, start + 1, start + 1]
        numbers.shuffle(group)
        ids = await asyncio.gather(*(send(api, shuffled, seq_id) for seq_id in group))
        assert len(set(ids)) == 2
        again = [await send(api, shuffled, start + 2) for _ in range(2)]
        assert again[0] == again[1]
    assert await final_state(api, shuffled) == await final_state(api, plain)


async def test_the_order_of_steps_matters_here(api: Api) -> None:
    """The test above could not fail if it did not."""
    first, second = await api.model(), await api.model()
    for seq_id in STEPS:
        await send(api, first, seq_id)
        path, arguments = request_for(second, STEPS.stop - seq_id)
        if path == "optim_step":
            arguments["json"]["seq_id"] = seq_id
        else:
            tokens = [STEPS.stop - seq_id, STEPS.stop - seq_id + 1, 3, 4]
            arguments["content"] = body_of(second, seq_id, [wire_datum(tokens)])
        assert (await api.http.post(f"/api/v1/{path}", **arguments)).status_code == 200
    assert await final_state(api, first) != await final_state(api, second)


async def test_chunks_are_acknowledged_before_their_predecessor_arrives(api: Api) -> None:
    model_id = await api.model()
    later = [await api.forward_backward(model_id, seq_id) for seq_id in (2, 3)]
    first = await api.forward_backward(model_id, 1)
    for accepted in (first, *later):
        assert (await api.result(accepted)).metrics["loss:sum"] > 0


async def test_a_step_does_not_wait_for_a_lost_number(tmp_path: Path) -> None:
    async with serving(tmp_path, gap_grace_s=3600.0) as api:  # the patience with chunks
        model_id = await api.model()
        await api.forward_backward(model_id, 1)
        step = await api.optim_step(model_id, 3)
        assert "metrics" in await api.result(step)


async def test_an_early_chunk_runs_after_the_grace_time(tmp_path: Path) -> None:
    async with serving(tmp_path, gap_grace_s=0.3) as api:
        model_id = await api.model()
        began = time.monotonic()
        accepted = await api.forward_backward(model_id, 2)
        assert (await api.result(accepted)).metrics["loss:sum"] > 0
        assert time.monotonic() - began >= 0.3


async def test_a_late_chunk_still_counts_when_no_step_ran_past_it(api: Api) -> None:
    both, late = await api.model(), await api.model()
    for seq_id in (1, 2):
        await api.forward_backward(both, seq_id)
    await api.result(await api.forward_backward(late, 2))
    await api.result(await api.forward_backward(late, 1))
    steps = [await api.result(await api.optim_step(model_id, 3)) for model_id in (both, late)]
    assert steps[0] == steps[1]


async def test_a_late_chunk_fails_when_a_step_ran_past_it(api: Api) -> None:
    model_id = await api.model()
    await api.result(await api.optim_step(model_id, 2))
    assert "after later operations" in await api.failure(await api.forward_backward(model_id, 1))
    await api.train(model_id, 3)


async def test_two_models_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path, gap_grace_s=60.0) as api:
        blocked, free = await api.model(), await api.model()
        held = await api.forward_backward(blocked, 2)
        await api.train(free, 1)
        status = await api.get(f"retrieve_future/{held['request_id']}")
        assert status.json()["status"] == "pending"


async def test_a_repeated_create_model_is_the_same_request(api: Api) -> None:
    session_id = await api.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "fake/tiny"}
    twice = await asyncio.gather(*(api.ok("create_model", **body) for _ in range(2)))
    assert twice[0] == twice[1] == await api.ok("create_model", **body)


async def test_a_repeated_sample_is_the_same_request(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    free = {"sampling_params": {"max_tokens": 5}, "num_samples": 3, "seq_id": 7}
    first, second = await asyncio.gather(*(api.sample(sampler_id, **free) for _ in range(2)))
    assert first == second
    other = await api.sample(sampler_id, **{**free, "seq_id": 8})
    assert other["request_id"] != first["request_id"]


async def test_a_repeated_step_is_executed_once(api: Api) -> None:
    once, twice = await api.model(), await api.model()
    for model_id in (once, twice):
        await api.train(model_id, 1)
    await api.result(await api.optim_step(twice, 2, learning_rate=0.1))
    assert await api.loss(once, 3) == await api.loss(twice, 3)


async def test_a_repeated_request_is_known_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        before = await api.forward_backward(model_id, 1)
        result = await api.retrieve(before["request_id"])
    async with serving(tmp_path) as api:
        after = await api.forward_backward(model_id, 1)
        assert after == before
        assert (await api.retrieve(after["request_id"])).content == result.content


async def test_requests_go_on_counting_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, gap_grace_s=60.0) as api:
        model_id = await api.model()
        await api.train(model_id, 1)
    async with serving(tmp_path, gap_grace_s=60.0) as api:
        passed = await api.result(await api.forward_backward(model_id, 3))
    assert "loss:sum" in passed.metrics


async def test_the_acknowledgement_is_on_record_before_work_begins(tmp_path: Path) -> None:
    recorded: list[bool] = []

    class Watched(FakeBackend):
        async def optim_step(self, model_id, params):
            row = await api.services.database.one(
                "SELECT status FROM futures WHERE kind = 'OptimStep'"
            )
            recorded.append(row is not None and row["status"] == "pending")
            return await super().optim_step(model_id, params)

    async with serving(tmp_path, backend=Watched(Config(data_dir=tmp_path))) as api:
        await api.result(await api.optim_step(await api.model(), 1))
    assert recorded == [True]


async def test_a_failed_forward_backward_drops_only_its_own_gradient(api: Api) -> None:
    good, mixed = await api.model(), await api.model()
    await api.forward_backward(good, 1)
    await api.forward_backward(mixed, 1)
    await api.failure(await api.forward_backward(mixed, 2, [wire_datum(weights=[1.0])]))
    norms = [
        (await api.result(await api.optim_step(m, 3)))["metrics"]["unclipped_grad_l2:mean"]
        for m in (good, mixed)
    ]
    assert norms[0] == norms[1] > 0


async def test_chunks_of_one_batch_add_up(api: Api) -> None:
    whole, parts = await api.model(), await api.model()
    data = [wire_datum([i, i + 1, 3]) for i in range(6)]
    await api.forward_backward(whole, 1, data)
    for seq_id in (1, 2, 3):
        await api.forward_backward(parts, seq_id, data[2 * seq_id - 2 : 2 * seq_id])
    norms = [
        (await api.result(await api.optim_step(m, 4)))["metrics"]["unclipped_grad_l2:mean"]
        for m in (whole, parts)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


async def test_forward_only_leaves_no_gradient(api: Api) -> None:
    model_id = await api.model()
    response = await api.http.post(
        "/api/v1/forward_backward",
        content=body_of(model_id, 1, forward_only=True),
        headers=PROTOBUF,
    )
    content = (await api.retrieve(response.json()["request_id"])).content
    assert decode_train_output(content).metrics["loss:sum"] > 0
    step = await api.result(await api.optim_step(model_id, 2))
    assert step["metrics"]["unclipped_grad_l2:mean"] == 0
