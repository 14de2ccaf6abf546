"""`tinkercloud` on the backend `fake`, with the numbers of an engine that drafts, and an operation
that goes on until the server ends: python -m tests.console.served serve ..."""

import asyncio
import sys
from typing import Any

from tinkercloud.backends.fake import FakeBackend
from tinkercloud.cli import main
from tinkercloud.core.types import AdamParams
from tinkercloud.speculative.draft_length.rounds import Kind, Reason, Round, Times
from tinkercloud.speculative.observability.telemetry import RoundReport, Telemetry

ENDLESS = 0.125
"""The learning rate of a step that does not end."""
ENGINE = {
    "engine_memory_bytes": 3 * 2**30,
    "sampling_memory_bytes": 2 * 2**30,
    "training_memory_bytes": 4 * 2**30,
    "kv_blocks": 400,
    "kv_blocks_held": 100,
}
PLAIN_MS, DRAFT_MS = 20.0, 4.0


def drafting() -> Telemetry:
    """Of rounds with three drafted tokens, of which 0, 1, 2 or 3 were accepted, and without."""
    telemetry = Telemetry()
    for accepted in (3, 2, 3, 0, 1, 3, 2, 3):
        times = Times(draft_ms=DRAFT_MS, verify_ms=PLAIN_MS)
        drafted = Round((3,), ((0.9, 0.8, 0.6),), (3,), (accepted,), times)
        telemetry.record(RoundReport("head", Kind.SPECULATIVE, Reason.NONE, drafted, version_lag=2))
    plain = Round((0,), ((),), (0,), (0,), Times(draft_ms=0.0, verify_ms=PLAIN_MS))
    telemetry.record(RoundReport("head", Kind.PLAIN, Reason.COMPARING, plain, version_lag=2))
    return telemetry


class Drafting(FakeBackend):
    _telemetry = drafting()

    def stats(self) -> dict[str, float | int | str]:
        return {**super().stats(), **ENGINE, "engine_restarts": 1}

    def speculation(self) -> dict[str, Any]:
        return {"chatty": self._telemetry.snapshot()}

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        if params.learning_rate == ENDLESS:
            await asyncio.Event().wait()
        return await super().optim_step(model_id, params)


if __name__ == "__main__":
    from tinkercloud import backends

    backends.BACKENDS["fake"] = "tests.console.served:Drafting"
    sys.exit(main())
