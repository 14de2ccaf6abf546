"""SamplingClient: samples from one version of the weights."""

import itertools
from typing import Any

import httpx

from tinker_gmi.async_methods import async_call, async_result
from tinker_gmi.connection.errors import APIResponseValidationError, APIStatusError
from tinker_gmi.connection.futures import APIFuture
from tinker_gmi.connection.session import HTTP_GONE, Session
from tinker_gmi.connection.transport import decoder, is_protobuf
from tinker_gmi.conversions import sample_response
from tinker_gmi.tokenizer import load_tokenizer
from tinker_gmi.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
    UntypedAPIFuture,
)
from tinkercloud.wire import codec

MAX_RESUBMISSIONS = 5


class SamplingClient:
    """Samples from the weights as of the creation of this client. Calls run concurrently, in no
    order."""

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        base_model: str,
        tokenizer_id: str | None = None,
    ):
        self._session = session
        self._sampling_session_id = sampling_session_id
        self._base_model = base_model
        self._tokenizer_id = tokenizer_id
        self._seq_ids = itertools.count()

    @property
    def sampling_session_id(self) -> str:
        return self._sampling_session_id

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
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
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
        return self._base_model

    get_base_model_async = async_call(get_base_model)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the base model. Needs transformers."""
        return load_tokenizer(self._tokenizer_id or self._base_model)

    async def _prompt_logprobs(self, prompt: ModelInput, last_n: int | None) -> list[float | None]:
        request = SampleRequest(
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=last_n,
        )
        logprobs = (await self._sample(request)).prompt_logprobs
        if logprobs is None:
            raise APIResponseValidationError("the server sent no prompt_logprobs")
        return logprobs

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        """Resubmits under a new sequence number where the server answers 410: it lost the
        request."""
        for attempt in itertools.count(1):
            try:
                return await self._sample_once(request)
            except APIStatusError as error:
                if error.status_code != HTTP_GONE or attempt > MAX_RESUBMISSIONS:
                    raise
        raise AssertionError("the loop ends by return or raise")

    async def _sample_once(self, request: SampleRequest) -> SampleResponse:
        request = request.model_copy(update={"seq_id": next(self._seq_ids)})
        transport = self._session.transport
        acknowledgement = await transport.post("asample", request, UntypedAPIFuture, patient=True)
        request_id, ids = acknowledgement.request_id, acknowledgement.sample_sequence_ids or []
        return await transport.retrieve(
            request_id, lambda response: _decode_sample(response, ids), protobuf=True
        )


async def open_sampling_client(
    session: Session, *, model_path: str | None = None, base_model: str | None = None
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
    sampler = await session.transport.get(
        f"samplers/{sampling_session.sampling_session_id}", GetSamplerResponse
    )
    return SamplingClient(
        session, sampling_session.sampling_session_id, sampler.base_model, sampler.tokenizer_id
    )


def _decode_sample(response: httpx.Response, sequence_ids: list[str]) -> SampleResponse:
    if not is_protobuf(response):
        return decoder(SampleResponse)(response)
    output = codec.decode_sample_output(response.content)
    if sequence_ids and len(sequence_ids) != len(output.sequences):
        raise APIResponseValidationError(
            f"{len(sequence_ids)} samples were acknowledged, {len(output.sequences)} returned"
        )
    return sample_response(output, sequence_ids)
