"""A run over an end of its engine beside the same run without one, through the API.

tests/embedded/process runs it on a CPU, where all bits are the same.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.api.harness import Api, serving, wire_datum
from tinkercloud.config import Config, EngineConfig, ModelSource
from tinkercloud.embedded.backend import EmbeddedBackend

NUM_STEPS = 4
ADAM = {"learning_rate": 1e-2}


@dataclass(frozen=True)
class Recovered:
    """apart: the largest difference of a log-probability between the runs, in nats. deviation: of
    one that a client got and the same one computed again, as /metrics has it. operations: of each
    run, (number, position, kind) of all that its model has."""

    apart: float
    deviation: float
    operations: tuple[list[tuple[int, int, str]], list[tuple[int, int, str]]]
    numerics: str
    num_recovered: int


async def over_an_end(
    model: Path, data_dir: Path, end_engine: Callable[[EmbeddedBackend], Awaitable[None]]
) -> Recovered:
    """model: named "tiny". Whoever calls it sees to it that there are no snapshots."""
    config = Config(
        data_dir=data_dir / "engine", models=(ModelSource("tiny", model),), engine=EngineConfig()
    )
    backend = EmbeddedBackend(config)
    async with serving(data_dir, backend=backend) as api:
        await backend.loaded()
        session = await api.session()
        names = [await model_of(api, session, number) for number in range(2)]
        calm = await trained(api, names[0])
        ended = await trained(api, names[1], lambda: end_engine(backend))
        for seen, name in zip((calm, ended), names, strict=True):  # both are brought back by now
            last = await api.forward_backward(name, 2 * NUM_STEPS + 1, data(99), forward_only=True)
            seen.append((await api.result(last)).outputs[0]["logprobs"])
        stats = api.services.recovery.stats()
        return Recovered(
            max(float(np.abs(a - b).max()) for a, b in zip(calm, ended, strict=True)),
            stats["replay_deviation_nats"],
            (await operations(api, names[0]), await operations(api, names[1])),
            backend.numerics(),
            int(stats["recoveries_total"]),
        )


async def model_of(api: Api, session: str, number: int) -> str:
    return await api.model(session, number, base_model="tiny", lora_config={"rank": 4, "seed": 3})


async def trained(
    api: Api, model_id: str, end: Callable[[], Awaitable[None]] | None = None
) -> list[Any]:
    """Log-probabilities of each pass. end: ends the engine when all is acknowledged, and some of
    it has run."""
    passes, steps = [], []
    for step in range(NUM_STEPS):
        passes.append(await api.forward_backward(model_id, 2 * step + 1, data(step)))
        steps.append(await api.optim_step(model_id, 2 * step + 2, **ADAM))
        if end is not None and step == NUM_STEPS // 2:
            await api.result(steps[0])
            await end()
    for accepted in steps:
        assert (await api.result(accepted))["metrics"]["unclipped_grad_l2:mean"] > 0
    return [(await api.result(accepted)).outputs[0]["logprobs"] for accepted in passes]


def data(number: int) -> list[Any]:
    return [wire_datum(tuple((7 * i + number) % 250 + 3 for i in range(24)))]


async def operations(api: Api, model_id: str) -> list[tuple[int, int, str]]:
    rows = await api.services.database.all(
        "SELECT seq_id, position, kind FROM operations WHERE model_id = ? AND applied"
        " ORDER BY position",
        model_id,
    )
    return [tuple(row) for row in rows]
