"""GPUs for one model: a Ray placement group whose bundles are sorted by node and GPU.

Bundle i of a `Placement` is rank i's: neighbours in rank order share a node, and on a node follow
its GPU numbers, so that tensor-parallel groups, which Megatron makes of consecutive ranks, do not
cross nodes without need. Taking GPUs is all or nothing: when anything fails, or the caller is
cancelled, the group is removed. Requests are served in order of arrival, so that small models
cannot starve a large one.
"""

import asyncio
import ipaddress
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.errors import CapacityTimeout
from tinkercloud.planning.plan import Plan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

CPUS_PER_BUNDLE = 1.0
# Fractions of a bundle, which trainer and engine may share. They limit nothing: Ray only counts
# them, and the probe must fit beside both when a placement is restored.
TRAIN_SHARE = 0.5
ROLLOUT_SHARE = 0.4
PROBE_SHARE = 0.05
PREPARED_S = 2.0  # that a group gets to be created before it is removed
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """One GPU. index: its number in Ray's group. gpu: as Ray numbers it on the node; -1: none."""

    index: int
    node_id: str
    address: str
    gpu: int


@dataclass(frozen=True, slots=True)
class Request:
    """device "cpu": bundles without a GPU, to run the same code on machines that have none."""

    name: str
    num_bundles: int
    strategy: Strategy = "PACK"
    device: Literal["cuda", "cpu"] = "cuda"
    timeout_s: float = 3600.0

    def resources(self) -> dict[str, float]:
        return {"CPU": CPUS_PER_BUNDLE} | ({"GPU": 1.0} if self.device == "cuda" else {})


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one actor is placed, and what it takes there."""

    group: "PlacementGroup"
    bundle: Bundle
    device: Literal["cuda", "cpu"]

    def options(self, share: float) -> dict[str, Any]:
        """For `ray.remote(...).options`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self.group,
            placement_group_bundle_index=self.bundle.index,
            placement_group_capture_child_tasks=False,
        )
        gpus = share if self.device == "cuda" else 0
        return {"num_cpus": share, "num_gpus": gpus, "scheduling_strategy": strategy}


@dataclass(frozen=True, slots=True)
class Placement:
    """A model's GPUs. bundles: in rank order."""

    group: "PlacementGroup"
    bundles: tuple[Bundle, ...]
    request: Request

    def slots(self, indices: Sequence[int]) -> list[Slot]:
        """indices: into `bundles`."""
        return [Slot(self.group, self.bundles[i], self.request.device) for i in indices]


def num_bundles(plan: Plan) -> int:
    """GPUs that a plan takes: shared ones are counted once."""
    rollout = plan.rollout.engines * plan.rollout.tp
    return (
        max(plan.layout.world, rollout) if plan.rollout.colocated else plan.layout.world + rollout
    )


def train_indices(plan: Plan) -> list[int]:
    return list(range(plan.layout.world))


def rollout_indices(plan: Plan) -> list[int]:
    """engines x tp of them, engine by engine."""
    first = 0 if plan.rollout.colocated else plan.layout.world
    return list(range(first, first + plan.rollout.engines * plan.rollout.tp))


def in_rank_order(bundles: Sequence[Bundle]) -> tuple[Bundle, ...]:
    """By node address (as a number: 10.0.0.9 before 10.0.0.10), node, GPU, then Ray's index."""

    def place(bundle: Bundle) -> tuple[tuple[int, int, str], str, int, int]:
        try:
            parsed = ipaddress.ip_address(bundle.address)
            address = (parsed.version, int(parsed), "")
        except ValueError:
            address = (99, 0, bundle.address)
        return address, bundle.node_id, bundle.gpu, bundle.index

    return tuple(sorted(bundles, key=place))


async def _free_nothing() -> None:
    """There are no idle GPUs to free."""


class Placer:
    """Hands out GPUs, first come first served. free_idle: called every POLL_S while the first in
    the queue finds too few."""

    def __init__(
        self,
        free_idle: Callable[[], Awaitable[None]] = _free_nothing,
        link: RayLink | None = None,
    ) -> None:
        self._queue = asyncio.Lock()  # asyncio's locks are fair: its waiters are the queue
        self._free_idle = free_idle
        self.link = link or RayLink()

    async def take(
        self, request: Request, waiting: Callable[[str | None], None] = lambda reason: None
    ) -> Placement:
        """Raises CapacityTimeout. waiting: called with the reason while GPUs are lacking, then with
        None."""
        deadline = time.monotonic() + request.timeout_s
        what = f"{request.num_bundles} {'GPUs' if request.device == 'cuda' else 'CPU bundles'}"
        waiting(f"waiting for {what}; others wait before it")
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                async with self._queue:
                    waiting(self.link.lost)
                    await self.link.connected()
                    waiting(f"waiting until {what} are free")
                    return await self._take(request)
        except TimeoutError:
            raise CapacityTimeout(
                f"{request.name} got no {what} within {request.timeout_s:g} s (the setting "
                "cluster.placement_timeout_s); delete models that are done, or add nodes"
            ) from None
        finally:
            waiting(None)

    async def restore(
        self, placement: Placement, waiting: Callable[[str | None], None] = lambda reason: None
    ) -> Placement:
        """The same group after a node was lost: Ray moves its bundles to other nodes.

        Raises CapacityTimeout. The group is kept in any case.
        """
        request = placement.request
        try:
            async with asyncio.timeout(request.timeout_s):
                waiting("waiting for nodes in place of lost ones")
                await _until_created(placement.group, self._free_idle, self.link)
                bundles = await _probe(placement.group, request, self.link)
                return Placement(placement.group, bundles, request)
        except TimeoutError:
            raise CapacityTimeout(
                f"no GPUs in place of the lost ones for {request.name} within "
                f"{request.timeout_s:g} s (the setting cluster.placement_timeout_s)"
            ) from None
        finally:
            waiting(None)

    async def _take(self, request: Request) -> Placement:
        begun = time.monotonic()
        group = await _create(request)
        try:
            await _until_created(group, self._free_idle, self.link)
            bundles = await _probe(group, request, self.link)
        except BaseException:  # cancelled too: the group would keep its GPUs
            if self.link.lost is None:
                await asyncio.shield(_remove(group))
            raise
        logger.info(
            "%s: %d bundles on %d nodes after %.1f s",
            *(request.name, len(bundles), len({b.node_id for b in bundles})),
            time.monotonic() - begun,
        )
        return Placement(group, bundles, request)


async def release(placement: Placement) -> None:
    """Give the GPUs back; what still runs on them is killed by Ray."""
    await _remove(placement.group)


async def num_lost(placements: Sequence[Placement]) -> int:
    """Bundles on nodes that Ray does not know as alive."""
    if not placements:
        return 0
    alive = await asyncio.to_thread(_nodes_alive)
    bundles = (bundle for placement in placements for bundle in placement.bundles)
    return sum(bundle.node_id not in alive for bundle in bundles)


def _nodes_alive() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


async def _create(request: Request) -> "PlacementGroup":
    """A group that is pending: Ray reserves its bundles when it can."""
    from ray.util import placement_group

    name = f"{request.name}#{uuid.uuid4().hex[:8]}"  # Ray requires unique names
    creation = asyncio.ensure_future(
        asyncio.to_thread(
            placement_group,
            [request.resources()] * request.num_bundles,
            strategy=request.strategy,
            name=name,
        )
    )
    try:
        return await asyncio.shield(creation)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: the group comes into being and must be removed.
        await asyncio.shield(_remove(await creation))
        raise


async def _until_created(
    group: "PlacementGroup", free_idle: Callable[[], Awaitable[None]], link: RayLink
) -> None:
    """Polls, since Ray's `wait` blocks its thread: a cancelled caller would leave that behind."""
    while not await asyncio.to_thread(_is_created, group):
        link.check()
        if not await asyncio.to_thread(group.wait, POLL_S):
            await free_idle()


def _is_created(group: "PlacementGroup") -> bool:
    return _table(group)["state"] == "CREATED"


def _table(group: "PlacementGroup") -> dict[str, Any]:
    from ray.util import placement_group_table

    return placement_group_table(group)


async def _probe(group: "PlacementGroup", request: Request, link: RayLink) -> tuple[Bundle, ...]:
    """Node and GPU of every bundle, by a task in each: Ray tells a GPU's number only to a task that
    runs on it (get_gpu_ids)."""
    import ray

    unplaced = [Bundle(i, "", "", -1) for i in range(request.num_bundles)]
    where = ray.remote(_where)
    references = [
        where.options(**Slot(group, bundle, request.device).options(PROBE_SHARE)).remote()
        for bundle in unplaced
    ]
    places = await asyncio.gather(*map(link.answer, references))
    return in_rank_order([Bundle(i, *place) for i, place in enumerate(places)])


def _where() -> tuple[str, str, int]:
    """Node id, address and GPU number of the bundle that this runs in."""
    import ray

    context = ray.get_runtime_context()
    gpus = ray.get_gpu_ids()
    return context.get_node_id(), ray.util.get_node_ip_address(), int(gpus[0]) if gpus else -1


async def _remove(group: "PlacementGroup") -> None:
    from ray.util import remove_placement_group

    # A group that is removed while Ray prepares its bundles leaves some of them reserved for ever
    # (ray-project/ray issue 64693); one that is created, or still pending, does not.
    if not await asyncio.to_thread(_is_created, group):
        await asyncio.to_thread(group.wait, PREPARED_S)
    await asyncio.to_thread(remove_placement_group, group)


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + deadline - time.monotonic()
