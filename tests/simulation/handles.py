"""What a client holds of the service: its models, and samplers."""

import asyncio
from dataclasses import dataclass, field

from tests.simulation.history import Request


@dataclass(eq=False)
class Model:
    model_id: str
    next_seq_id: int = 1
    saved: list[tuple[str, "asyncio.Task[None]", Request]] = field(default_factory=list)


@dataclass(eq=False)
class Sampler:
    """named: its id, which that of a save has from the answer. ready: set once the server has said
    that it is there."""

    named: str | Request
    ready: "asyncio.Task[bool]"
    next_seq_id: int = 0

    @property
    def sampler_id(self) -> str:
        return self.named if isinstance(self.named, str) else self.named.sampler_id
