"""Weights from trainer to engines: the half that runs in the API process. No torch.

A sync happens while nobody samples (`RolloutManager.updating`), and is all or nothing: engines that
failed during it, or got other bytes than were sent, are restarted before they serve again.
`cluster.weights.sender` is the other half; where neither of its ways is open, weights go by disk.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinkercloud.cluster.rollout.engine_client import EngineClient, everywhere
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.errors import EngineDied

logger = logging.getLogger(__name__)

How = Literal["tensor", "broadcast"]
RECEIVED = "tinkercloud_received"
"""The action by which SGLang's weights checker reports what arrived; see
`cluster.sglang.weight_digests`."""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine. ranks: the training ranks on its GPUs, in its order ("tensor" only)."""

    url: str
    tp: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the ranks need to know. key: of the engines. address: of the node of training rank 0,
    for the rendezvous of the group ("broadcast" only)."""

    how: How
    targets: tuple[Target, ...]
    key: str = field(repr=False)
    timeout_s: float = 600.0
    group: str = ""
    address: str = ""
    backend: Literal["nccl", "gloo"] = "nccl"

    @property
    def group_size(self) -> int:
        return 1 + sum(target.tp for target in self.targets)


@dataclass(frozen=True, slots=True)
class Sent:
    """What the trainer sent. digests: of every tensor, by name; see `tensor_digest`."""

    num_bytes: int
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """How a model's weights go to its engines.

    tp: ranks of each engine. first_ranks: per engine the training rank on its first GPU, whose
    successors are on its others ("tensor" only). address: of the node of training rank 0, as the
    engines reach it.
    """

    how: How
    tp: int
    first_ranks: Mapping[int, int] = field(default_factory=dict[int, int])
    address: str = "127.0.0.1"
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout_s: float = 600.0


async def send_weights(
    manager: RolloutManager,
    weights: str,
    route: Route,
    send: Callable[[Transfer], Awaitable[Sent]],
) -> Sent:
    """Give every engine the trainer's weights under a new name.

    send: makes every training rank call `sender.send` with its buckets and this transfer; returns
    rank 0's answer. Raises EngineDied; all engines are restarted then.
    """
    begun = time.monotonic()
    async with manager.updating(weights) as clients:
        transfer = _transfer(manager, route)
        # To SGLang the buckets between begin and end are one update: what it does after loading
        # weights happens once, at the end.
        await everywhere(clients, "/begin_weight_update")
        sent = await send(transfer)
        await everywhere(clients, "/end_weight_update")
        await check_received(clients, sent)
    logger.info(
        "weights %s: %d bytes by %s to %d engines in %.0f ms",
        *(weights, sent.num_bytes, route.how, len(clients), 1000 * (time.monotonic() - begun)),
    )
    return sent


async def load_weights(manager: RolloutManager, weights: str, folder: Path) -> None:
    """The same from a Hugging Face folder that every engine's node can read."""
    async with manager.updating(weights) as clients:
        await everywhere(clients, "/update_weights_from_disk", disk_update(folder))


def disk_update(folder: Path) -> dict[str, Any]:
    return {"model_path": str(folder), "flush_cache": False}


async def check_received(clients: Sequence[EngineClient], sent: Sent) -> None:
    """Raises EngineDied when any rank of any engine got other bytes than were sent."""
    answers = await everywhere(clients, "/weights_checker", {"action": RECEIVED})
    for client, answer in zip(clients, answers, strict=True):
        for rank in answer["ranks"]:
            got = {n: d for n, d in rank["checksums"].items() if not n.startswith("draft")}
            names = got.keys() | sent.digests.keys()
            wrong = {name for name in names if got.get(name) != sent.digests.get(name)}
            if wrong:
                raise EngineDied(
                    f"{client.url} received {len(wrong)} of {len(sent.digests)} tensors otherwise "
                    f"than they were sent, {min(wrong)} among them"
                )


def _transfer(manager: RolloutManager, route: Route) -> Transfer:
    engines = manager.engines_by_index()
    if route.how == "tensor":
        targets = tuple(
            Target(url, route.tp, tuple(range(first, first + route.tp)))
            for index, url in engines.items()
            for first in (route.first_ranks[index],)
        )
        return Transfer("tensor", targets, manager.key, route.timeout_s)
    return Transfer(
        "broadcast",
        tuple(Target(url, route.tp) for url in engines.values()),
        manager.key,
        timeout_s=route.timeout_s,
        group=f"tinkercloud-{secrets.token_hex(4)}",
        address=route.address,
        backend=route.backend,
    )
