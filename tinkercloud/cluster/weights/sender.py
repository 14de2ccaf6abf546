"""The trainer's half of a weight sync: runs in the training ranks, calls SGLang's servers.

"tensor": trainer and engines share GPUs. A bucket's tensors stay where they are; each rank gives
the engine rank on its GPU handles to its copy. "broadcast": they have GPUs of their own; rank 0 and
the engines' ranks form a process group, over which it broadcasts buckets.

The formats are SGLang's, without importing SGLang: a handle is torch's pickle of a shared tensor,
in base64; a GPU is named by its UUID, since its number differs from process to process.
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
from dataclasses import replace
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from tinkercloud.cluster.gpus.rendezvous import Rendezvous
from tinkercloud.cluster.rollout.weight_sync import Sent, Target, Transfer
from tinkercloud.cluster.weights.tensor_digest import tensor_digest
from tinkercloud.errors import EngineDied

Bucket = list[tuple[str, Tensor]]

_DEVICE_ARGUMENT = 6  # position of the device in torch's rebuild_cuda_tensor
_POLL_S = 0.001
_JOIN_S = 120.0
_LEAVE_S = 60.0


class _BucketSender(Protocol):
    def __call__(self, bucket: Bucket) -> None:
        """Returns when the engines have loaded it."""
        ...


def send(buckets: Iterable[Bucket], transfer: Transfer) -> Sent:
    """Every training rank calls this with the same buckets, in lockstep; all return the same.

    Raises EngineDied on every rank, after the same bucket, when an engine failed to load it.
    """
    num_bytes, digests = 0, dict[str, str]()
    senders = nullcontext(_send_nothing) if _rank() else _broadcast_group(transfer)
    if transfer.how == "tensor":
        senders = nullcontext(_Handles(transfer))
    with _shared_context(senders) as send_bucket:
        for bucket in buckets:
            # On every rank: a bucket is a collective of all ranks, and its tensors may be freed
            # only once the engines have loaded it.
            with _shared_errors():
                send_bucket(bucket)
            for name, tensor in bucket:
                num_bytes += tensor.nbytes
                digests[name] = tensor_digest(tensor)
    return Sent(num_bytes, digests)


# ---- errors that all ranks raise


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(item: Any) -> list[Any]:
    """Every rank's item, in rank order."""
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


@contextmanager
def _shared_errors() -> Iterator[None]:
    """What fails on one rank fails on all. Also a barrier: no rank leaves before all have come."""
    error = None
    try:
        yield
    except (EngineDied, OSError, RuntimeError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    errors = [text for text in _gather(error) if text is not None]
    if errors:
        raise EngineDied(f"the engines did not load the weights: {errors[0]}")


@contextmanager
def _shared_context(context: AbstractContextManager[_BucketSender]) -> Iterator[_BucketSender]:
    entered: list[_BucketSender] = []
    with _shared_errors():
        entered.append(context.__enter__())
    try:
        yield entered[0]
    finally:
        context.__exit__(None, None, None)


def _send_nothing(bucket: Bucket) -> None:
    """Of a rank whose copy is not needed."""


# ---- handles


class _Handles:
    """Tensors by handle: one request per engine, with an entry for each of its ranks."""

    def __init__(self, transfer: Transfer):
        self._transfer = transfer
        self._is_source = any(_rank() in target.ranks for target in transfer.targets)

    def __call__(self, bucket: Bucket) -> None:
        handles = _gather(_pickled(bucket) if self._is_source else None)
        for target in self._transfer.targets:
            if target.ranks[0] == _rank():
                body = {"serialized_named_tensors": [handles[rank] for rank in target.ranks]}
                body |= {"flush_cache": False}
                _post(self._transfer, target, "/update_weights_from_tensor", body)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # frees what the engines have closed


def _pickled(bucket: Bucket) -> str:
    """base64 of a list of (name, handle)."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    # torch's other strategy passes file descriptors, which only a process's relatives can receive;
    # an engine can open a file by its name.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        # Sharing a CPU tensor moves it to shared memory: that of a copy, not the model's.
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
def _broadcast_group(transfer: Transfer) -> Iterator[_BucketSender]:
    """A process group of rank 0 and the engines' ranks, in order, for the length of the block."""
    with (
        closing(Rendezvous(transfer.address)) as rendezvous,
        ThreadPoolExecutor(max(1, len(transfer.targets))) as threads,
    ):
        group, first = None, 1
        joins: list[Future[Any]] = []
        for target in transfer.targets:
            body = {
                "master_address": rendezvous.address,
                "master_port": rendezvous.port,
                "rank_offset": first,
                "world_size": transfer.group_size,
                "group_name": transfer.group,
                "backend": transfer.backend,
            }
            first += target.tp
            path = "/init_weights_update_group"
            joins.append(threads.submit(_post, transfer, target, path, body))
        try:
            group = _join(transfer, rendezvous)
            _finish(joins)
            yield _Broadcast(transfer, group, threads)
        finally:
            path, body = "/destroy_weights_update_group", {"group_name": transfer.group}
            short = replace(transfer, timeout_s=_LEAVE_S)
            for target in transfer.targets:
                threads.submit(_post, short, target, path, body)
            if group is not None:
                dist.destroy_process_group(group)


def _join(transfer: Transfer, rendezvous: Rendezvous) -> Any:
    """As SGLang makes its side: a group beside the default one, with processes that are not in it.
    torch has no public function for that."""
    from torch.distributed import distributed_c10d as c10d

    size, wait = transfer.group_size, timedelta(seconds=min(transfer.timeout_s, _JOIN_S))
    store = rendezvous.open(size, wait)
    group, _ = c10d._new_process_group_helper(
        *(size, 0, [], c10d.Backend(transfer.backend), c10d.PrefixStore(transfer.group, store)),
        group_name=c10d.GroupName(transfer.group),
        backend_options=None,
        timeout=timedelta(seconds=transfer.timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


class _Broadcast:
    """A bucket as one flat tensor of bytes (SGLang's "flattened_bucket")."""

    def __init__(self, transfer: Transfer, group: Any, threads: ThreadPoolExecutor):
        self._transfer = transfer
        self._group = group
        self._threads = threads

    def __call__(self, bucket: Bucket) -> None:
        # Wide types first: SGLang views each tensor in place, which requires alignment.
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
        path = "/update_weights_from_distributed"
        calls = [
            self._threads.submit(_post, self._transfer, target, path, body)
            for target in self._transfer.targets
        ]
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        while work is not None and not work.is_completed():
            # An engine that refused the request does not enter the broadcast: it would never end.
            if any(call.done() and call.exception() is not None for call in calls):
                break
            time.sleep(_POLL_S)
        _finish(calls)


def _finish(calls: list["Future[Any]"]) -> None:
    for call in calls:
        call.result()


def _post(transfer: Transfer, target: Target, path: str, body: dict[str, Any]) -> None:
    """Raises EngineDied with the engine's error."""
    url, data = target.url + path, json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {transfer.key}"}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=transfer.timeout_s) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:1000]
        raise EngineDied(f"{url} answered {error.code}: {text}") from error
    except OSError as error:
        raise EngineDied(f"{url}: {error}") from error
