"""SamplingClient: samples from one version of the weights."""

import asyncio
import base64
import itertools
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from tinker_gmi.async_methods import async_call, async_result
from tinker_gmi.connection import settings
from tinker_gmi.connection.closing import ClosesOnExit
from tinker_gmi.connection.completions import Completions
from tinker_gmi.connection.errors import APIResponseValidationError
from tinker_gmi.connection.futures import APIFuture
from tinker_gmi.connection.progress import QueueLog, Work
from tinker_gmi.connection.retries import RetryConfig, SampleRetries
from tinker_gmi.connection.session import Session
from tinker_gmi.connection.transport import Transport, decoder, is_protobuf
from tinker_gmi.conversions import sample_response
from tinker_gmi.tokenizer import load_tokenizer
from tinker_gmi.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    CreateSessionRequest,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    ModelInput,
    QueueState,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SamplingSessionFuturesTarget,
    TensorData,
    UntypedAPIFuture,
)
from tinkercloud import __version__
from tinkercloud.wire import codec

SEQ_IDS_PER_CLIENT = 1_000_000_000
"""Each client of a sampling session numbers its samples from its own multiple of this."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """retry_config None: samples that the server lost are sent again, other failures are raised.
    record_stability_info: the server keeps what `stable_reinforce` needs of each sample."""

    retry_config: RetryConfig | None = None
    record_stability_info: bool = False


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a client samples from."""

    sampling_session_id: str
    base_model: str
    tokenizer_id: str | None = None


class SamplingClient(ClosesOnExit):
    """Samples from the weights as of the creation of this client. Calls run concurrently, in no
    order. Clients can be pickled: the other process makes its own client of the same sampler.
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        options: SamplingOptions | None = None,
        *,
        is_clone: bool = False,
    ):
        self._session = session
        self._sampler = sampler
        self._options = options or SamplingOptions()
        self._is_clone = is_clone
        self._opening: asyncio.Task[_Opened] | None = None
        self._queue_log = QueueLog(f"sampling from {sampler.sampling_session_id}")

    @property
    def sampling_session_id(self) -> str:
        return self._sampler.sampling_session_id

    def sample(  # noqa: PLR0913 - the official signature
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` continuations. target_prompt_logprobs: token ids to score, int64
        (P-1, K), -1 to skip; row i scores position i + 1. prompt_alt_tokens_k: draws in place of
        each prompt token. prompt_logprobs_last_n: score only the last n prompt tokens."""
        request = SampleRequest(
            prompt=prompt,
            num_samples=num_samples,
            sampling_params=sampling_params,
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._options.record_stability_info,
        )
        return self._session.submit(self._sample(request))

    sample_async = async_result(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """log p(token | tokens before it) for each prompt token; None for the first, and where
        prompt_logprobs_last_n leaves it out."""
        return self._session.submit(self._prompt_logprobs(prompt, prompt_logprobs_last_n))

    compute_logprobs_async = async_result(compute_logprobs)

    def get_base_model(self) -> str:
        """The name of the base model; sends no request."""
        return self._sampler.base_model

    get_base_model_async = async_call(get_base_model)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the base model. Needs transformers."""
        return load_tokenizer(self._sampler.tokenizer_id or self._sampler.base_model)

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called at each long poll that ends without a sample, on the client's own thread; warns of
        a pause once a minute. Override it in a subclass to do something else."""
        self._queue_log(queue_state, queue_state_reason)

    # ---- the same sampler in other processes

    def get_sampler_handle(self) -> str:
        """A text from which `from_sampler_handle` makes clients of the same sampler, in any process
        and any number of times. It carries no key."""
        fields = {
            "base_url": self._session.transport.base_url,
            "session_id": self._session.started_id,
            "record_stability_info": self._options.record_stability_info,
            **asdict(self._sampler),
        }
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> "SamplingClient":
        """A client of the sampler behind a handle; api_key: by default TINKER_API_KEY. `close` it,
        or use it as a context manager. Raises ValueError where the text is no handle."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(handle))
            base_url, session_id = str(fields["base_url"]), str(fields["session_id"])
            options = SamplingOptions(record_stability_info=bool(fields["record_stability_info"]))
            names = ("sampling_session_id", "base_model", "tokenizer_id")
            sampler = Sampler(*(fields[name] for name in names))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError("this is no handle of get_sampler_handle") from error
        transport = Transport(base_url, settings.api_key(api_key), f"tinker_gmi/{__version__}")
        request = CreateSessionRequest(sdk_version=__version__)
        session = Session(transport, request, existing_id=session_id)
        return SamplingClient(session, sampler, options, is_clone=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingClient.from_sampler_handle, (self.get_sampler_handle(),)

    def close(self) -> None:
        """Close the connections of a client of `from_sampler_handle`; any other ends with its
        ServiceClient. Idempotent."""
        if self._is_clone:
            self._session.close("success", None)

    # ---- requests

    async def _prompt_logprobs(self, prompt: ModelInput, last_n: int | None) -> list[float | None]:
        request = SampleRequest(
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=last_n,
        )
        logprobs = (await self._sample(request)).prompt_logprobs
        if logprobs is None:
            raise APIResponseValidationError("the server sent no prompt_logprobs")
        return logprobs

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._open())
        opened = await asyncio.shield(self._opening)
        return await opened.retries.run(lambda: self._sample_once(request, opened))

    async def _open(self) -> "_Opened":
        """At the first sample, so that a clone sends nothing before it; numbers of a clone's
        samples cannot meet those of another client."""
        await self._session.session_id()  # its heartbeat, and what the server asks of clients
        config = self._session.config
        clone_id = await self._clone_id() if self._is_clone else 0
        target = SamplingSessionFuturesTarget(
            sampling_session_id=self.sampling_session_id, cloned_sampler_id=clone_id
        )
        by_session = bool(config.sample_use_retrieve_futures)
        return _Opened(
            seq_ids=itertools.count(clone_id * SEQ_IDS_PER_CLIENT),
            retries=SampleRetries(
                self._options.retry_config, config.sample_max_concurrent_requests
            ),
            completions=Completions(self._session.transport, target) if by_session else None,
        )

    async def _clone_id(self) -> int:
        if not self._session.config.sample_join_sampling_session:
            return random.randint(1, SEQ_IDS_PER_CLIENT)
        request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
        reply = await self._session.transport.post(
            "join_sampling_session", request, JoinSamplingSessionResponse
        )
        return reply.client_counter

    async def _sample_once(self, request: SampleRequest, opened: "_Opened") -> SampleResponse:
        numbered = request.model_copy(update={"seq_id": next(opened.seq_ids)})
        transport = self._session.transport
        acknowledgement = await transport.post("asample", numbered, UntypedAPIFuture, patient=True)
        request_id, ids = acknowledgement.request_id, acknowledgement.sample_sequence_ids or []
        if opened.completions is not None:
            await opened.completions.wait(request_id)
        response = await self._session.retrieve(
            Work(request_id, "Sample", self.sampling_session_id),
            lambda response: _decode_sample(response, ids),
            protobuf=True,
            on_queue=self.on_queue_state_change,
        )
        if opened.completions is not None:
            opened.completions.fetched(request_id)
        return response


@dataclass(frozen=True, slots=True)
class _Opened:
    """A client that has sampled. completions: None where each sample is polled for itself."""

    seq_ids: "itertools.count[int]"
    retries: SampleRetries
    completions: Completions | None


async def open_sampling_client(
    session: Session,
    *,
    model_path: str | None = None,
    base_model: str | None = None,
    options: SamplingOptions | None = None,
) -> SamplingClient:
    """Create a sampling session from saved weights or from a base model."""
    if (model_path is None) == (base_model is None):
        raise ValueError("give either model_path or base_model")
    request = CreateSamplingSessionRequest(
        session_id=await session.session_id(),
        sampling_session_seq_id=session.next_sampling_session_seq_id(),
        model_path=model_path,
        base_model=base_model,
    )
    sampling_session = await session.transport.post(
        "create_sampling_session", request, CreateSamplingSessionResponse
    )
    answer = await session.transport.get(
        f"samplers/{sampling_session.sampling_session_id}", GetSamplerResponse
    )
    sampler = Sampler(sampling_session.sampling_session_id, answer.base_model, answer.tokenizer_id)
    return SamplingClient(session, sampler, options)


def _decode_sample(response: httpx.Response, sequence_ids: list[str]) -> SampleResponse:
    if not is_protobuf(response):
        return decoder(SampleResponse)(response)
    output = codec.decode_sample_output(response.content)
    if sequence_ids and len(sequence_ids) != len(output.sequences):
        raise APIResponseValidationError(
            f"{len(sequence_ids)} samples were acknowledged, {len(output.sequences)} returned"
        )
    return sample_response(output, sequence_ids)
