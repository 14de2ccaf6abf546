"""stable_reinforce over the API: recorded samples, spans, sessions, users, expiry."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import not_
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.harness import Api, serving, wire_datum
from tests.waiting import async_wait_for
from tinkercloud.core.types import ProvenanceSpan
from tinkercloud.wire.codec import WireDatum

PROMPT = [1, 2, 3]
DRAWN = {"max_tokens": 5, "temperature": 1.0, "seed": 3}


def datum_of(
    sequence_id: str, tokens: Sequence[int], advantage: float = 1.0, **inputs: Any
) -> WireDatum:
    """As the cookbook builds it: the prompt and a sampled sequence, shifted by one."""
    n, m = len(PROMPT), len(tokens)
    datum = wire_datum(
        [*PROMPT, *tokens[:-1]],
        target_tokens=np.array([0] * (n - 1) + list(tokens)),
        weights=0,
        advantages=np.array([0.0] * (n - 1) + [advantage] * m, np.float32),
        **inputs,
    )
    return replace(
        datum,
        model_input_spans=(
            ProvenanceSpan("prompt", sequence_id, 0, n),
            ProvenanceSpan("sampled", sequence_id, 0, m - 1),
        ),
        loss_fn_input_spans=(
            ProvenanceSpan("prompt", sequence_id, 1, n - 1),
            ProvenanceSpan("sampled", sequence_id, 0, m),
        ),
    )


class Scene:
    """A model, and samples of its first weights."""

    def __init__(self, api: Api, session: str, model: str, sampled: Mapping[str, Any]):
        self.api, self.session, self.model = api, session, model
        self.sampled = sampled  # sequence id -> SampledSequence

    @classmethod
    async def begin(cls, api: Api, *, record: bool = True, num_samples: int = 2) -> "Scene":
        session = await api.session()
        model = await api.model(session)
        accepted = await api.sample(
            await api.sampler(session),
            num_samples=num_samples,
            sampling_params=DRAWN,
            record_stability_info=record,
        )
        output = await api.result(accepted)
        ids = accepted["sample_sequence_ids"]
        return cls(api, session, model, dict(zip(ids, output.sequences, strict=True)))

    def data(self, **inputs: Any) -> list[WireDatum]:
        return [datum_of(name, s.tokens.tolist(), **inputs) for name, s in self.sampled.items()]

    async def train(self, seq_id: int, data: Sequence[WireDatum], **options: Any) -> Any:
        options = {"loss_fn": "stable_reinforce"} | options
        return await self.api.forward_backward(self.model, seq_id, data, **options)

    async def refusal(self, seq_id: int, data: Sequence[WireDatum], **options: Any) -> str:
        return await self.api.failure(await self.train(seq_id, data, **options))


async def test_on_policy_the_loss_is_that_of_importance_sampling(api: Api) -> None:
    scene = await Scene.begin(api)
    output = await api.result(await scene.train(1, scene.data()))
    num_tokens = sum(len(s.tokens) for s in scene.sampled.values())
    assert output.metrics["loss:sum"] == pytest.approx(-num_tokens, rel=1e-5)  # all ratios are 1
    step = await api.result(await api.optim_step(scene.model, 2, learning_rate=0.1))
    assert step["metrics"]["unclipped_grad_l2:mean"] > 0


async def test_the_recorded_logprobs_count_and_not_those_that_are_sent(api: Api) -> None:
    scene = await Scene.begin(api)
    plain = await api.result(await scene.train(1, scene.data(), forward_only=True))
    sent = [
        replace(d, inputs={**d.inputs, "logprobs": np.full(len(d.chunks[0]), -9.0, np.float32)})
        for d in scene.data()
    ]
    other = await api.result(await scene.train(2, sent, forward_only=True))
    assert other.metrics["loss:sum"] == plain.metrics["loss:sum"]


async def test_weights_scale_the_advantages(api: Api) -> None:
    scene = await Scene.begin(api)
    [datum, *_] = scene.data()
    length = len(datum.chunks[0])
    for seq_id, weight in enumerate((1.0, 0.5, 0.0), 1):
        weights = np.full(length, weight, np.float32)
        scaled = replace(datum, inputs={**datum.inputs, "weights": weights})
        output = await api.result(await scene.train(seq_id, [scaled], forward_only=True))
        num_tokens = len(next(iter(scene.sampled.values())).tokens)
        assert output.metrics["loss:sum"] == pytest.approx(-weight * num_tokens, rel=1e-5)


async def test_training_with_the_loss_raises_what_had_an_advantage(api: Api) -> None:
    scene = await Scene.begin(api)
    before = await api.result(await scene.train(1, scene.data(), forward_only=True))
    for number in (2, 4, 6):
        await scene.train(number, scene.data())
        await api.optim_step(scene.model, number + 1, learning_rate=0.1)
    after = await api.result(await scene.train(8, scene.data(), forward_only=True))
    rows = [
        (new["logprobs"][2:], old["logprobs"][2:])
        for new, old in zip(after.outputs, before.outputs, strict=True)
    ]
    assert all(new.sum() > old.sum() for new, old in rows)


async def test_chunks_add_up_to_the_whole(api: Api) -> None:
    scene = await Scene.begin(api, num_samples=4)
    data = scene.data()
    await api.train(scene.model, 1)  # off-policy from here on
    whole = await api.result(await scene.train(3, data))
    norm = (await api.result(await api.optim_step(scene.model, 4, learning_rate=0.0)))["metrics"]
    parts = [await api.result(await scene.train(5 + i, data[i : i + 1])) for i in range(4)]
    norm_of_parts = await api.result(await api.optim_step(scene.model, 9, learning_rate=0.0))
    assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(
        whole.metrics["loss:sum"], rel=1e-12
    )
    assert norm_of_parts["metrics"]["unclipped_grad_l2:mean"] == pytest.approx(
        norm["unclipped_grad_l2:mean"], rel=1e-9
    )


async def test_a_sample_that_was_not_recorded_is_refused_with_the_remedy(api: Api) -> None:
    scene = await Scene.begin(api, record=False)
    text = await scene.refusal(1, scene.data())
    assert next(iter(scene.sampled)) in text
    assert "record_stability_info=True" in text


async def test_data_without_provenance_is_refused_with_the_remedy(api: Api) -> None:
    scene = await Scene.begin(api)
    bare = [replace(d, model_input_spans=(), loss_fn_input_spans=()) for d in scene.data()]
    assert "with_provenance" in await scene.refusal(1, bare)


async def test_tokens_that_were_not_sampled_are_refused_with_their_place(api: Api) -> None:
    scene = await Scene.begin(api)
    name, sequence = next(iter(scene.sampled.items()))
    tokens = sequence.tokens.tolist()
    tokens[1] = (tokens[1] + 1) % 1000
    text = await scene.refusal(1, [datum_of(name, tokens)])
    assert f"position 4 has token {tokens[1]}" in text
    assert f"is {sequence.tokens[1]}" in text


async def test_another_session_of_the_user_is_refused_by_name(api: Api) -> None:
    scene = await Scene.begin(api)
    other = Scene(api, *await _model_elsewhere(api), scene.sampled)
    text = await other.refusal(1, scene.data())
    assert scene.session in text
    assert other.session in text
    assert "one ServiceClient" in text


async def test_another_user_sees_nothing_of_a_sample(api: Api) -> None:
    scene = await Scene.begin(api)
    bob = api.as_user("bob")
    other = Scene(bob, *await _model_elsewhere(bob), scene.sampled)
    text = await other.refusal(1, scene.data())
    unknown = [datum_of("sample-unknown:0", [5, 6, 7])]
    assert scene.session not in text
    assert "nothing is on record" in text
    assert "nothing is on record" in await other.refusal(2, unknown)
    assert await api.result(await scene.train(1, scene.data()))  # and ann's is as it was


async def _model_elsewhere(api: Api) -> tuple[str, str]:
    session = await api.session()
    return session, await api.model(session)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"alpha": 0.5}, "'alpha' is not known.*kl_coeff"),
        ({"kl_coeff": -0.1}, "at least 0"),
        ({"kl_coeff": "high"}, "'kl_coeff' must be a finite number, not 'high'"),
        ({"clip_high_threshold": 0.0}, "above 0"),
        ({"mode": "sequence"}, "'mode' is not known"),
    ],
    ids=str,
)
async def test_configuration_is_refused_by_name(api: Api, config: Any, text: str) -> None:
    scene = await Scene.begin(api)

    assert re.search(text, await scene.refusal(1, scene.data(), loss_fn_config=config))
    assert await api.result(await scene.train(2, scene.data()))


async def test_a_kl_term_trains_sampled_tokens_without_an_advantage(api: Api) -> None:
    scene = await Scene.begin(api)
    await api.train(scene.model, 1)
    config = {"kl_coeff": 0.5}
    await scene.train(3, scene.data(advantage=0.0), loss_fn_config=config)
    step = await api.result(await api.optim_step(scene.model, 4, learning_rate=0.0))
    assert step["metrics"]["unclipped_grad_l2:mean"] > 0


async def test_an_advantage_of_a_prompt_token_is_refused(api: Api) -> None:
    scene = await Scene.begin(api)
    [datum, *_] = scene.data()
    ones = np.ones_like(datum.inputs["advantages"])
    faulty = replace(datum, inputs={**datum.inputs, "advantages": ones})
    assert "sampled tokens only" in await scene.refusal(1, [faulty])


async def test_spans_of_other_losses_need_no_record_but_must_tile(api: Api) -> None:
    scene = await Scene.begin(api, record=False)
    data = [
        replace(d, inputs={**d.inputs, "logprobs": np.zeros(len(d.chunks[0]), np.float32)})
        for d in scene.data()
    ]
    assert await api.result(await scene.train(1, data, loss_fn="importance_sampling"))
    short = [replace(d, model_input_spans=d.model_input_spans[:1]) for d in data]
    assert "add up" in await scene.refusal(2, short, loss_fn="importance_sampling")


async def test_the_end_of_a_session_ends_its_records(api: Api) -> None:
    scene = await Scene.begin(api)
    rows = "SELECT * FROM recorded_samples"
    assert len(await api.services.database.all(rows)) == 1
    await api.ok(f"sessions/{scene.session}/finish", reason={"type": "success"}, detail=None)
    assert not await api.services.database.all(rows)
    assert not await api.services.database.all("SELECT * FROM recorded_sequences")


AGE = "UPDATE recorded_samples SET used_at = used_at - ?"


async def test_use_renews_a_record(tmp_path: Path) -> None:
    async with serving(tmp_path, record_ttl_s=1000.0) as api:
        used, unused = await Scene.begin(api), await Scene.begin(api)
        await api.services.database.write(AGE, 900.0)
        await api.result(await used.train(1, used.data()))
        await api.services.database.write(AGE, 200.0)
        await api.services.sample_records.expire()
        assert await api.result(await used.train(2, used.data()))
        assert "1000 s ago" in await unused.refusal(1, unused.data())


async def test_unused_records_are_swept(tmp_path: Path) -> None:
    async with serving(tmp_path, record_ttl_s=0.2) as api:
        await Scene.begin(api)
        rows = "SELECT * FROM recorded_sequences"
        await async_wait_for("no record is left", lambda: api.services.database.all(rows), not_)


async def test_the_records_of_a_user_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, record_bytes=300) as api:  # 92 bytes are one scene's
        bob = await Scene.begin(api.as_user("bob"))
        scenes = [await Scene.begin(api) for _ in range(5)]
        assert "record_bytes" in await scenes[0].refusal(1, scenes[0].data())
        assert await api.result(await scenes[-1].train(1, scenes[-1].data()))
        assert await bob.api.result(await bob.train(1, bob.data()))
        total = await api.services.database.one("SELECT SUM(num_bytes) AS n FROM recorded_samples")
        assert total["n"] <= 2 * 300


async def test_a_sample_larger_than_all_records_may_be_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, record_bytes=50) as api:
        sampler = await api.sampler(await api.session())
        accepted = await api.sample(
            sampler, num_samples=4, sampling_params=DRAWN, record_stability_info=True
        )
        assert "fewer samples" in await api.failure(accepted)


async def test_records_outlive_the_server_process(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        scene = await Scene.begin(api)
    async with serving(tmp_path) as api:
        model = await api.model(scene.session, number=1)
        again = Scene(api.as_user("ann"), scene.session, model, scene.sampled)
        assert await api.result(await again.train(1, again.data()))
