"""Custom losses that run here: their upload, and the batches that name one."""

import asyncio
import json

from tinker_gmi.types import CreateCustomLossRequest, UntypedAPIFuture
from tinkercloud.core.custom_batch import custom_batch
from tinkercloud.core.data_converter import DataConverter
from tinkercloud.core.raw_batch import RawBatch
from tinkercloud.core.task_manager import TaskManager, Work
from tinkercloud.core.types import TrainBatch
from tinkercloud.errors import InvalidRequest
from tinkercloud.losses.custom.graph import checked as checked_loss
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.common.numbers import checked
from tinkercloud.storage.futures import Outcome, Ticket, completed_json
from tinkercloud.storage.loss_storage import LossStorage
from tinkercloud.storage.metadata import Model

KIND = "CreateCustomLoss"
MAX_BODY_CHARS = 2**20
MAX_LOSSES = 256  # of one session


class LossService:
    def __init__(self, losses: LossStorage, sessions: SessionService, tasks: TaskManager):
        self._losses = losses
        self._sessions = sessions
        self._tasks = tasks
        sessions.when_finished(self._forget_session)
        tasks.resume(KIND, self._resumed)

    async def create(self, user: str, body: CreateCustomLossRequest) -> UntypedAPIFuture:
        """The id of a loss whose graph was checked. What is wrong with it fails the future."""
        await self._sessions.require_open(user, body.session_id)
        checked("custom_loss_seq_id", body.custom_loss_seq_id, lowest=0)
        ticket = Ticket(user, KIND, f"loss|{user}|{_loss_id(body)}")
        kept = body.model_dump_json().encode()
        request_id = await self._tasks.submit(ticket, self._work(user, body), kept)
        return UntypedAPIFuture(request_id=request_id)

    async def _resumed(self, ticket: Ticket, kept: bytes) -> Work:
        return self._work(ticket.user, CreateCustomLossRequest.model_validate_json(kept))

    def _work(self, user: str, body: CreateCustomLossRequest) -> Work:
        loss_id = _loss_id(body)

        async def work() -> Outcome:
            text = json.dumps({"name": body.name, "inputs": body.inputs, "graph": body.graph})
            if len(text) > MAX_BODY_CHARS:
                raise InvalidRequest(f"the graph has more than {MAX_BODY_CHARS} characters of JSON")
            await asyncio.to_thread(checked_loss, json.loads(text))
            if await self._losses.num_of_session(body.session_id) >= MAX_LOSSES:
                raise InvalidRequest(
                    f"this session has {MAX_LOSSES} custom losses; use one of them again"
                )
            await self._losses.add(loss_id, user, body.session_id, text)
            return completed_json({"loss_id": loss_id, "type": "create_custom_loss"})

        return work

    async def batch(self, model: Model, converter: DataConverter, raw: RawBatch) -> TrainBatch:
        """Raises InvalidRequest."""
        loss_id = raw.loss_fn_config.get("loss_id")
        if not isinstance(loss_id, str) or len(raw.loss_fn_config) > 1:
            raise InvalidRequest(
                "loss_fn 'custom' takes one loss_fn_config, the text loss_id of create_custom_loss"
            )
        text = await self._losses.body(loss_id, model.user, model.session_id)
        if text is None:
            raise InvalidRequest(
                f"custom loss {loss_id[:100]!r} is not one of this session; create it with "
                "create_custom_loss"
            )
        return await asyncio.to_thread(custom_batch, converter, raw, text)

    async def _forget_session(self, user: str, session_id: str) -> None:
        await self._losses.delete_session(session_id)


def _loss_id(body: CreateCustomLossRequest) -> str:
    return f"{body.session_id}:loss:{body.custom_loss_seq_id}"
