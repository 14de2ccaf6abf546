"""The trainer's half of a weight sync: runs in the training ranks, talks to SGLang's servers.

"tensor": trainer and engines share GPUs. A bucket's tensors stay where they are; each rank gives
the engine's rank on its GPU handles to its own copy. "broadcast": they do not; rank 0 and the
engines' ranks form a process group of their own, through which buckets go.

What SGLang expects, without SGLang: handles are torch's own pickles of shared tensors, base64;
a GPU is named by its unique id, since its number differs from process to process.
"""

import base64
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from tinkercloud.cluster.gpus.rendezvous import Meeting
from tinkercloud.cluster.rollout.weight_sync import Sent, Transfer
from tinkercloud.cluster.weights.tensor_digest import tensor_digest
from tinkercloud.errors import EngineDied

Bucket = list[tuple[str, Tensor]]

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor; its signature has not changed for years
_POLL_S = 0.001
_JOIN_S = 120.0


class _Carrier(Protocol):
    def __call__(self, bucket: Bucket) -> None:
        """Returns when the engines have loaded it."""
        ...


def send(buckets: Iterable[Bucket], transfer: Transfer) -> Sent:
    """Every training rank calls this with its own buckets, in lockstep; all get the same answer.

    Raises EngineDied on every rank, after the same bucket, when an engine did not take it.
    """
    num_bytes, digests = 0, dict[str, str]()
    carriers = nullcontext(_carry_nothing) if _rank() else _broadcast_group(transfer)
    if transfer.how == "tensor":
        carriers = nullcontext(_Handles(transfer))
    with _agreed_context(carriers) as carry:
        for bucket in buckets:
            with _agreed():
                carry(bucket)
            for name, tensor in bucket:
                num_bytes += tensor.nbytes
                digests[name] = tensor_digest(tensor)
    return Sent(num_bytes, digests)


# ---- ranks that share one fate


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(item: Any) -> list[Any]:
    """Everybody's item, by rank."""
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


@contextmanager
def _agreed() -> Iterator[None]:
    """What fails on one rank fails on all; also keeps the ranks together until all are through."""
    error = None
    try:
        yield
    except (EngineDied, OSError, RuntimeError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    errors = [found for found in _gather(error) if found is not None]
    if errors:
        raise EngineDied(f"the engines did not take the weights: {errors[0]}")


@contextmanager
def _agreed_context(context: AbstractContextManager[_Carrier]) -> Iterator[_Carrier]:
    entered: list[_Carrier] = []
    with _agreed():
        entered.append(context.__enter__())
    try:
        yield entered[0]
    finally:
        context.__exit__(None, None, None)


def _carry_nothing(bucket: Bucket) -> None:
    """A rank whose copy nobody needs."""


# ---- handles


class _Handles:
    """Tensors by handle, one list per engine with an entry for each of its ranks."""

    def __init__(self, transfer: Transfer):
        self._transfer = transfer
        self._mine = any(_rank() in target.ranks for target in transfer.targets)

    def __call__(self, bucket: Bucket) -> None:
        handles = _gather(_pickled(bucket) if self._mine else None)
        for target in self._transfer.targets:
            if target.ranks[0] == _rank():
                body = {"serialized_named_tensors": [handles[rank] for rank in target.ranks]}
                body |= {"flush_cache": False}
                _post(target.url, "/update_weights_from_tensor", body, self._transfer.timeout_s)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _pickled(bucket: Bucket) -> str:
    """base64 of a list of (name, handle)."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    # Descriptors pass between relatives only; files have names.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        # On a CPU sharing moves a tensor's memory: a copy's, not the model's.
        shared = [(name, t.detach() if t.is_cuda else t.detach().clone()) for name, t in bucket]
        buffer = io.BytesIO()
        _HandlePickler(buffer).dump(shared)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild: Any
        arguments: tuple[Any, ...]
        rebuild, arguments = reductions.reduce_tensor(obj)
        if rebuild is reductions.rebuild_cuda_tensor:
            place = _DEVICE_ARGUMENT
            unique = str(torch.cuda.get_device_properties(arguments[place]).uuid)
            arguments = (*arguments[:place], unique, *arguments[place + 1 :])
        return rebuild, arguments


# ---- broadcast


@contextmanager
def _broadcast_group(transfer: Transfer) -> Iterator[_Carrier]:
    """Rank 0 here, then the engines' ranks in order. The group ends with the block."""
    with (
        closing(Meeting(transfer.address)) as meeting,
        ThreadPoolExecutor(max(1, len(transfer.targets))) as threads,
    ):
        group, first = None, 1
        joins: list[Future[Any]] = []
        for target in transfer.targets:
            body = {
                "master_address": meeting.address,
                "master_port": meeting.port,
                "rank_offset": first,
                "world_size": transfer.group_size,
                "group_name": transfer.group,
                "backend": transfer.backend,
            }
            first += target.tp
            path = "/init_weights_update_group"
            joins.append(threads.submit(_post, target.url, path, body, transfer.timeout_s))
        try:
            group = _join(transfer, meeting)
            _finish(joins)
            yield _Broadcast(transfer, group, threads)
        finally:
            body = {"group_name": transfer.group}
            for target in transfer.targets:
                threads.submit(_post, target.url, "/destroy_weights_update_group", body, 60.0)
            if group is not None:
                dist.destroy_process_group(group)


def _join(transfer: Transfer, meeting: Meeting) -> Any:
    """As SGLang makes its side: outside the default group, which torch has no public way for."""
    from torch.distributed import distributed_c10d as c10d

    size, wait = transfer.group_size, timedelta(seconds=min(transfer.timeout_s, _JOIN_S))
    store = meeting.open(size, wait)
    group, _ = c10d._new_process_group_helper(
        *(size, 0, [], c10d.Backend(transfer.backend), c10d.PrefixStore(transfer.group, store)),
        group_name=c10d.GroupName(transfer.group),
        backend_options=None,
        timeout=timedelta(seconds=transfer.timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


class _Broadcast:
    """A bucket as one run of bytes."""

    def __init__(self, transfer: Transfer, group: Any, threads: ThreadPoolExecutor):
        self._transfer = transfer
        self._group = group
        self._threads = threads

    def __call__(self, bucket: Bucket) -> None:
        # Wide types first: SGLang views each tensor in place, which asks for alignment.
        ordered = sorted(bucket, key=lambda item: -item[1].element_size())
        flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for _, t in ordered])
        body = {
            "names": [name for name, _ in ordered],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            "shapes": [list(tensor.shape) for _, tensor in ordered],
            "group_name": self._transfer.group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        path, timeout_s = "/update_weights_from_distributed", self._transfer.timeout_s
        calls = [
            self._threads.submit(_post, target.url, path, body, timeout_s)
            for target in self._transfer.targets
        ]
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        while work is not None and not work.is_completed():
            # An engine that refused does not take part: waiting for it would be for ever.
            if any(call.done() and call.exception() is not None for call in calls):
                break
            time.sleep(_POLL_S)
        _finish(calls)


def _finish(calls: list["Future[Any]"]) -> None:
    for call in calls:
        call.result()


def _post(url: str, path: str, body: dict[str, Any], timeout_s: float) -> None:
    """Raises EngineDied with the engine's words."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        words = error.read().decode(errors="replace")[:1000]
        raise EngineDied(f"{url}{path} answered {error.code}: {words}") from error
    except OSError as error:
        raise EngineDied(f"{url}{path}: {error}") from error
