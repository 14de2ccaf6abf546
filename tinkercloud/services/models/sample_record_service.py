"""Which samples are kept for training on them, for how long, and for whom."""

from collections.abc import Collection, Mapping

from tinkercloud.core.types import RecordedSequence, SampleOutput, SampleRequest
from tinkercloud.errors import InvalidRequest
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.storage.metadata import Model
from tinkercloud.storage.sample_records import (
    SampleOwner,
    SampleRecordStorage,
    num_bytes,
    request_of,
)

MAX_LOOKUP_BYTES = 256 * 1024**2  # of the samples that one training request names
ROOM_AFTER_SHRINKING = 0.9  # of max_bytes, so that not every sample needs a deletion
MAX_NAMES = 3  # of sequences in an error


class SampleRecordService:
    """max_bytes: of one user's samples. ttl_s: that a sample is kept after its last use."""

    def __init__(
        self, records: SampleRecordStorage, sessions: SessionService, max_bytes: int, ttl_s: float
    ):
        self._records = records
        self._max_bytes, self._ttl_s = max_bytes, ttl_s
        self._bytes: dict[str, int] = {}  # by user, an upper bound: deletions are not subtracted
        sessions.when_finished(self._records.delete_session)

    async def add(
        self, request_id: str, owner: SampleOwner, request: SampleRequest, output: SampleOutput
    ) -> None:
        size = num_bytes(request, output)
        if size > self._max_bytes:
            raise InvalidRequest(
                f"this sample takes {size} bytes with record_stability_info, and the server keeps "
                f"{self._max_bytes} of each user; take fewer samples per request"
            )
        # The sum counts what is being written too, so that concurrent samples cannot pass it.
        total = self._bytes.get(owner.user)
        if total is None or total + size > self._max_bytes:
            self._bytes.pop(owner.user, None)
            await self._records.shrink(owner.user, self._room(size))
            total = await self._records.total_bytes(owner.user)
            total = max(total, self._bytes.get(owner.user, 0))  # others were added meanwhile
        self._bytes[owner.user] = total + size
        await self._records.add(request_id, owner, request, output)

    def _room(self, size: int) -> int:
        return min(int(ROOM_AFTER_SHRINKING * self._max_bytes), self._max_bytes - size)

    async def of(
        self, model: Model, sequence_ids: Collection[str]
    ) -> Mapping[str, RecordedSequence]:
        """The sequences that a training request of the model names; their time begins anew.

        Raises InvalidRequest for any that is not on record, or of another session.
        """
        if not sequence_ids:
            return {}
        requests = {request_of(sequence) for sequence in sequence_ids}
        samples = await self._records.samples(model.user, requests)
        self._check_session(model, sequence_ids, {k: s.session_id for k, s in samples.items()})
        total = sum(sample.num_bytes for sample in samples.values())
        if total > MAX_LOOKUP_BYTES:
            raise InvalidRequest(
                f"the sequences that this request names were sampled by requests of {total} bytes; "
                f"send fewer datums at once, so that it is at most {MAX_LOOKUP_BYTES}"
            )
        sequences = await self._records.sequences(model.user, model.session_id, sequence_ids)
        self._check_recorded(sequence_ids, sequences)
        await self._records.renew(model.user, requests)
        return sequences

    def _check_session(
        self, model: Model, sequence_ids: Collection[str], session_of: Mapping[str, str]
    ) -> None:
        for sequence in sorted(sequence_ids):
            session = session_of.get(request_of(sequence), model.session_id)
            if session != model.session_id:
                raise InvalidRequest(
                    f"sequence {sequence!r} was sampled in session {session!r}, and the model is "
                    f"of session {model.session_id!r}; samples can be trained on in their own "
                    "session only: sample and train with one ServiceClient, or choose another loss"
                )

    def _check_recorded(self, sequence_ids: Collection[str], recorded: Collection[str]) -> None:
        missing = sorted(set(sequence_ids) - set(recorded))
        if missing:
            names = ", ".join(map(repr, missing[:MAX_NAMES]))
            more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
            raise InvalidRequest(
                f"nothing is on record of sequence {names}{more}: it was sampled without "
                f"record_stability_info=True, or more than {self._ttl_s:g} s ago without being "
                "trained on, or made room for newer ones (record_bytes). Sample again from a "
                "client made with record_stability_info=True"
            )

    async def expire(self) -> None:
        await self._records.expire(self._ttl_s)
        self._bytes.clear()  # read anew, without what was deleted
