"""Sampling sessions and samples. A sampler names one immutable version of weights
(`sampler_versions.py`).
"""

import asyncio
import uuid
from dataclasses import dataclass, replace
from hashlib import sha256

from tinker_gmi.types import (
    CreateSamplingClientRequest,
    CreateSamplingSessionRequest,
    GetSamplerResponse,
    SampleRequest,
    UntypedAPIFuture,
)
from tinkercloud.core.data_converter import MAX_SAMPLES, seeded
from tinkercloud.core.task_manager import Work
from tinkercloud.core.types import FromModel, OnTokens, SampleOutput, TokenChunk
from tinkercloud.core.types import SampleRequest as CoreSampleRequest
from tinkercloud.errors import (
    ContextLengthExceeded,
    EngineDied,
    InvalidRequest,
    NumberTaken,
    SamplerNotFound,
    VersionLost,
)
from tinkercloud.services.common.numbers import checked, sample_key
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.sample_size import most_tokens, num_prompt_tokens
from tinkercloud.services.models.sampler_versions import SamplerVersions
from tinkercloud.services.recovery.lane_operations import Submitted, as_json
from tinkercloud.services.recovery.version_store import version_key
from tinkercloud.storage.futures import SAMPLING_KIND, Outcome, Ticket, completed_protobuf
from tinkercloud.storage.metadata import Model, Sampler, SamplerKind
from tinkercloud.storage.sample_records import SampleOwner, sequence_id
from tinkercloud.wire.codec import encode_sample_output

INLINE_BYTES = 1024 * 1024  # larger outputs are encoded off the event loop
INLINE_TOKENS = 4096  # longer prompts are checked off the event loop
MAX_ATTEMPTS = 3  # at a sample, over ends of the engine: what ends it each time must not go on


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """version: the backend's name of the weights that the output was drawn from."""

    version: str
    output: SampleOutput


class SamplingService:
    def __init__(self, dependencies: Dependencies):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._metadata = dependencies.metadata
        self._tasks = dependencies.tasks
        self._sessions = dependencies.sessions
        self._checkpoints = dependencies.checkpoints
        self._records = dependencies.sample_records
        self._usage = dependencies.usage
        self._on_policy = dependencies.on_policy
        self._versions = SamplerVersions(dependencies)
        self._shares_prefixes = dependencies.shares_prefixes
        self._samplers: dict[tuple[str, str], Sampler] = {}
        self._foreign: set[str] = set()  # samplers of other users' checkpoints
        self._joining = asyncio.Lock()
        # Samplers; in memory only: drafts change speed alone.
        self._undrafted: set[str] = set()
        self._detailed: set[str] = set()
        self._sessions.when_finished(self._release_session)
        self._tasks.resume(SAMPLING_KIND, self._resumed)

    async def close(self) -> None:
        await self._versions.close()

    # sampling sessions

    async def create(self, user: str, body: CreateSamplingSessionRequest) -> str:
        """The id of a sampler for a checkpoint or, where none is named, a base model."""
        await self._sessions.require_open(user, body.session_id)
        number = checked("sampling_session_seq_id", body.sampling_session_seq_id, lowest=0)
        sampler_id = f"{body.session_id}:sample:{number}"
        await self._add(user, sampler_id, body.session_id, body.base_model, body.model_path)
        return self._with_drafts(sampler_id, speculate=body.speculate, detailed=body.detailed)

    async def create_alone(self, user: str, body: CreateSamplingClientRequest) -> str:
        """The same without a number, in a new session where the body names none."""
        session_id = body.session_id
        if session_id is None:
            session_id = await self._sessions.create(user, {"tags": ["sampling"]})
        await self._sessions.require_open(user, session_id)
        sampler_id = f"{session_id}:sample:{uuid.uuid4().hex}"
        await self._add(user, sampler_id, session_id, body.base_model, body.model_path)
        return self._with_drafts(sampler_id, speculate=body.speculate, detailed=body.detailed)

    def _with_drafts(self, sampler_id: str, *, speculate: bool, detailed: bool) -> str:
        if not speculate:
            self._undrafted.add(sampler_id)
        if detailed:
            self._detailed.add(sampler_id)
        return sampler_id

    async def _add(
        self,
        user: str,
        sampler_id: str,
        session_id: str,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        if model_path is not None:
            checkpoint = await self._checkpoints.loadable(user, model_path)
            name = self._catalog.get(base_model or checkpoint.base_model).name
            sampler = Sampler(
                *(sampler_id, user, session_id, "checkpoint", name),
                model_path=model_path,
                directory=checkpoint.directory,
            )
        elif base_model is not None:
            name = self._catalog.get(base_model).name
            sampler = Sampler(sampler_id, user, session_id, "base", name)
        else:
            raise InvalidRequest("a sampling session needs base_model or model_path")
        return await self._record(sampler)

    async def _record(self, sampler: Sampler) -> str:
        """Recording the same sampler again changes nothing; another under its id is refused."""
        await self._metadata.put_sampler(sampler)
        if await self.require(sampler.user, sampler.sampler_id) != sampler:
            raise InvalidRequest(
                f"sampling session {sampler.sampler_id!r} exists with other weights; count on"
            )
        return sampler.sampler_id

    async def publish_model(self, model: Model, number: int, kind: SamplerKind) -> str:
        """An ephemeral sampler of the model as it is now (wire specification, section 3.3); called
        in the model's lane.

        inflight: all such samplers of a model follow its latest inflight save.
        """
        checked("sampling_session_seq_id", number, lowest=0)
        sampler_id = f"{model.session_id}:sample:{number}"
        sampler = Sampler(
            *(sampler_id, model.user, model.session_id, kind, model.base_model),
            model_id=model.model_id,
            request_id=self._tasks.running_request_id(),
        )
        there = await self._metadata.sampler(sampler_id, model.user)
        if there is not None and there != sampler:  # the same: this operation, tried before
            raise InvalidRequest(f"sampling session {sampler_id!r} exists already; count on")
        version = await self._backend.publish(FromModel(model.model_id))
        # By its key what is published again is known.
        for source in (version, version_key(sampler)):
            self._on_policy.published(model.model_id, source)
        try:
            await self._record(sampler)
        except Exception:  # the disk is full, say: nobody would release the version
            await self._backend.release(version)
            raise
        await self._versions.put(sampler, version)
        return sampler_id

    async def info(self, user: str, sampler_id: str, *, local: bool) -> GetSamplerResponse:
        sampler = await self.require(user, sampler_id)
        return GetSamplerResponse(
            sampler_id=sampler.sampler_id,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
            tokenizer_id=self._catalog.tokenizer_id(sampler.base_model, local=local),
        )

    async def join(self, user: str, sampler_id: str) -> int:
        """The number of one more client of a sampling session, from 1 on, never given twice. Its
        samples count from number * 10**9 (wire specification, section 3.4)."""
        sampler = await self.require(user, sampler_id)
        await self._sessions.require_open(user, sampler.session_id)
        async with self._joining:  # the number is on record before it is given away
            return await self._metadata.add_sampler_client(sampler)

    async def require(self, user: str, sampler_id: str) -> Sampler:
        """Raises SamplerNotFound."""
        sampler = self._samplers.get((user, sampler_id))
        if sampler is None:
            sampler = await self._metadata.sampler(sampler_id, user)
            if sampler is None:
                raise SamplerNotFound(sampler_id)
            directory = sampler.directory
            if directory is not None and await self._checkpoints.is_foreign(user, directory):
                self._foreign.add(sampler_id)
            self._samplers[user, sampler_id] = sampler
        return sampler

    # samples

    async def sample(self, user: str, body: SampleRequest) -> UntypedAPIFuture:
        """Acknowledge one sampling request with an id for each sequence to come."""
        checked("num_samples", body.num_samples, lowest=1, highest=MAX_SAMPLES)
        if body.seq_id is not None:
            checked("seq_id", body.seq_id, lowest=0)
        sampler = await self._sampler_of(user, body)
        key = sample_key(user, sampler.sampler_id, body.seq_id)
        ticket = Ticket(user, SAMPLING_KIND, key, None, body.seq_id, sampler.sampler_id)
        try:
            request_id = await self._submit(sampler, body, ticket)
        except NumberTaken as error:  # refused, its client would ask again
            request_id = await self._tasks.refuse(Ticket(user, SAMPLING_KIND), error)
        # as many as samples, or the client asserts (wire specification, section 4.1)
        ids = [sequence_id(request_id, index) for index in range(body.num_samples)]
        return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    async def _submit(self, sampler: Sampler, body: SampleRequest, ticket: Ticket) -> str:
        """The request id. Raises NumberTaken."""
        num_tokens = 0
        if sampler.base_model in self._catalog.names:  # else the sample will fail
            try:
                self._catalog.converter(sampler.base_model).room_after(body)
            except ContextLengthExceeded as error:
                # Of a million tokens, say: written as JSON they would hold up everybody.
                digest = sha256(str(error).encode()).digest()
                return await self._tasks.refuse(replace(ticket, digest=digest), error)
            context = self._catalog.get(sampler.base_model).max_context_length
            num_tokens = most_tokens(body, context)
        sent = as_json(body)
        with_seed = seeded(body)  # so that after a restart it gives the same tokens
        submitted = Submitted.of(sent if with_seed is body else as_json(with_seed), sent)
        ticket = replace(ticket, digest=submitted.digest, num_tokens=num_tokens)
        return await self._tasks.submit(ticket, self._work(sampler, with_seed), submitted.request)

    def _work(self, sampler: Sampler, body: SampleRequest) -> Work:
        async def work() -> Outcome:
            # Here and not before the acknowledgement: a client retries a refused POST with 410
            # for ever (wire specification, section 5); a failed future ends the sample.
            request = await self.checked(sampler, body)
            drawn = await self.draw(sampler, request)
            if body.record_stability_info:  # before anybody can train on it
                owner = SampleOwner(sampler.user, sampler.session_id, sampler.sampler_id)
                request_id = self._tasks.running_request_id()
                await self._records.add(request_id, owner, request, drawn.output)
            if drawn.output.num_bytes <= INLINE_BYTES:
                return completed_protobuf(encode_sample_output(drawn.output))
            encoded = await asyncio.to_thread(encode_sample_output, drawn.output)
            return completed_protobuf(encoded)

        return work

    async def _resumed(self, ticket: Ticket, kept: bytes) -> Work:
        assert ticket.sampler_id is not None
        sampler = await self.require(ticket.user, ticket.sampler_id)
        return self._work(sampler, SampleRequest.model_validate_json(kept))

    async def _sampler_of(self, user: str, body: SampleRequest) -> Sampler:
        """The named sampler; for a bare base_model or model_path one that is not recorded."""
        if body.sampling_session_id is not None:
            return await self.require(user, body.sampling_session_id)
        if body.base_model is None and body.model_path is None:
            raise InvalidRequest("asample needs sampling_session_id, model_path or base_model")
        # one recorded sampler per weights, not one per request
        meaning = body.base_model
        if body.model_path is not None:
            meaning = (await self._checkpoints.loadable(user, body.model_path)).directory
        place = f"direct:{body.base_model}:{meaning}"
        sampler = self._samplers.get((user, place))
        if sampler is not None:
            return sampler
        weights = CreateSamplingClientRequest(
            base_model=body.base_model, model_path=body.model_path
        )
        sampler = await self.require(user, await self.create_alone(user, weights))
        # another request for these weights may have made one meanwhile
        return self._samplers.setdefault((user, place), sampler)

    async def _checked(self, sampler: Sampler, body: SampleRequest) -> CoreSampleRequest:
        converter = self._catalog.converter(sampler.base_model)
        if num_prompt_tokens(body) <= INLINE_TOKENS and body.target_prompt_logprobs is None:
            return converter.sample_request(body)
        return await asyncio.to_thread(converter.sample_request, body)

    async def checked(self, sampler: Sampler, body: SampleRequest) -> CoreSampleRequest:
        """What `draw` takes; body's names of weights are not read. Raises InvalidRequest,
        SessionFinished, CheckpointNotFound."""
        if sampler.session_id:  # it is on record
            await self._sessions.require_open(sampler.user, sampler.session_id)
            await self._sessions.seen(sampler.user, sampler.session_id)
        if sampler.sampler_id in self._foreign:  # until its owner unpublishes it
            assert sampler.directory is not None, "it samples a checkpoint"
            path = sampler.model_path or sampler.directory
            await self._checkpoints.require_readable(sampler.user, sampler.directory, path)
        request = await self._checked(sampler, body)
        return replace(
            request,
            speculate=sampler.sampler_id not in self._undrafted,
            details_for=sampler.sampler_id if sampler.sampler_id in self._detailed else "",
            cache_salt="" if self._shares_prefixes else sampler.user,
            user=sampler.user,
        )

    async def draw(
        self, sampler: Sampler, request: CoreSampleRequest, on_tokens: OnTokens | None = None
    ) -> DrawnSample:
        """Sample at once, without a request id or a row for the result: for answers that stream.

        Cancelling the call ends its samples."""
        num_prompt, num_sampled = len(request.prompt), 0

        def count(chunk: TokenChunk) -> None:
            nonlocal num_sampled
            num_sampled += len(chunk.tokens)
            if on_tokens is not None:
                on_tokens(chunk)

        try:
            drawn = await self._drawn(sampler, request, None if on_tokens is None else count)
        except asyncio.CancelledError:
            self._usage.abandoned(sampler, num_prompt, num_sampled)
            raise
        self._usage.sampled(sampler, num_prompt, drawn.output)
        return drawn

    async def release(self, sampler: Sampler) -> None:
        """Its weights are not kept for it any more; a later sample publishes them again."""
        await self._versions.leave(sampler)

    async def _drawn(
        self, sampler: Sampler, request: CoreSampleRequest, on_tokens: OnTokens | None
    ) -> DrawnSample:
        """Over again where the engine ended underway. Not a stream's: its reader has tokens."""
        num_ends = num_lost = 0
        while True:
            try:
                return await self._attempt(sampler, request, on_tokens)
            except VersionLost:  # of an engine that is gone; it was dropped
                num_lost += 1
                if num_lost == MAX_ATTEMPTS:
                    raise
            except EngineDied as error:
                if on_tokens is not None:
                    raise
                num_ends, num_lost = num_ends + 1, 0
                if num_ends == MAX_ATTEMPTS:
                    raise EngineDied(
                        f"{error}. This sample was underway each of {MAX_ATTEMPTS} times that the "
                        "engine process ended, and is not tried again: ask for fewer samples or a "
                        "shorter prompt, and see the server's log for the reason"
                    ) from None

    async def _attempt(
        self, sampler: Sampler, request: CoreSampleRequest, on_tokens: OnTokens | None
    ) -> DrawnSample:
        if sampler.model_id is not None:  # what it published may have to be made again
            self._tasks.works_on(sampler.model_id)
        version = await self._versions.get(sampler)
        self._tasks.works_on(version)
        try:
            output = await self._backend.sample(version, request, on_tokens)
        except VersionLost:
            await self._versions.drop(sampler, version)
            raise
        self._on_policy.drawn(version, request, output)
        return DrawnSample(version, output)

    async def _release_session(self, user: str, session_id: str) -> None:
        samplers = await self._metadata.samplers_of_session(session_id, user)
        await self._tasks.cancel_session_samples(user, {each.sampler_id for each in samplers})
        for sampler in samplers:
            self._samplers.pop((user, sampler.sampler_id), None)
            self._undrafted.discard(sampler.sampler_id)
            self._detailed.discard(sampler.sampler_id)
            self._foreign.discard(sampler.sampler_id)
            await self._versions.leave(sampler)
