"""TrainingClient: the operations on one model."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from tinker_gmi.async_methods import async_call, async_result
from tinker_gmi.batches import batch_requests, decode_output
from tinker_gmi.connection.errors import TinkerError
from tinker_gmi.connection.futures import APIFuture, ClientFuture
from tinker_gmi.connection.lane import Operation
from tinker_gmi.connection.progress import QueueLog, RequestType, Work
from tinker_gmi.connection.retries import RetryConfig
from tinker_gmi.connection.session import Session
from tinker_gmi.conversions import merge_outputs
from tinker_gmi.losses.local_loss import (
    CustomLossFn,
    LocalLoss,
    differentiate,
    forward_data,
    with_local_metrics,
)
from tinker_gmi.losses.traced_loss import LossHandle, check_inputs, run_traced
from tinker_gmi.sampling_client import (
    Sampler,
    SamplingClient,
    SamplingOptions,
    open_sampling_client,
)
from tinker_gmi.tokenizer import load_tokenizer
from tinker_gmi.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LossFnType,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    SamplingClientKind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UntypedAPIFuture,
    WireModel,
)
from tinkercloud.wire import codec

T = TypeVar("T")
AckT = TypeVar("AckT")
ModelT = TypeVar("ModelT", bound=WireModel)
LossFnConfig = Mapping[str, float | str]


class TrainingClient:
    """Trains one model. The server runs the operations in the order of the calls; a call returns
    at once, so that several operations can be pending.

    A batch of more than 1024 datums or 5 MB is sent as several requests, whose gradients add up.
    If one of them fails, the gradient of the others has been added.
    """

    def __init__(self, session: Session, info: GetInfoResponse):
        self._session = session
        self._info = info
        self._lane = session.lane()
        self._queue_log = QueueLog(f"training of {info.model_id}")

    @property
    def model_id(self) -> str:
        return self._info.model_id

    def get_console_url(self) -> str:
        """The server's page about this training run."""
        return f"{self._session.transport.base_url}/training_runs/{self.model_id}"

    # ---- gradients

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossFnConfig | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and log-probabilities, without a gradient."""
        batch = self._batch(data, loss_fn, loss_fn_config, forward_only=True)
        return self._ordered(lambda: self._post_batch(batch), self._collect)

    forward_async = async_call(forward)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossFnConfig | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of the loss, a sum over tokens and datums, to the accumulated one."""
        batch = self._batch(data, loss_fn, loss_fn_config)
        return self._ordered(lambda: self._post_batch(batch), self._collect)

    forward_backward_async = async_call(forward_backward)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFn | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """forward_backward with a loss of the user's own. A handle of `create_custom_loss` runs on
        the server, where that takes it. A function runs here, as `loss_fn(data, logprobs)`, and
        returns a torch scalar and metrics: it costs one more forward pass, and needs torch.
        loss_type_input: logprobs is all that there is."""
        if loss_type_input not in (None, "logprobs"):
            raise ValueError(f"loss_type_input {loss_type_input!r} is not offered; only 'logprobs'")
        datums = list(data)
        if isinstance(loss_fn, LossHandle):
            if loss_fn.session_id != self._session.started_id:
                raise ValueError(f"loss {loss_fn.name!r} is of another session")
            check_inputs(loss_fn, datums)
            if loss_fn.loss_id is not None:
                return self.forward_backward(datums, "custom", {"loss_id": loss_fn.loss_id})
            loss_fn = functools.partial(run_traced, loss_fn)
        function = loss_fn
        forward = self._batch(forward_data(datums), "cross_entropy", None, forward_only=True)
        return self._ordered(
            lambda: self._post_custom(datums, function, forward), self._collect_custom
        )

    forward_backward_custom_async = async_call(forward_backward_custom)

    # ---- steps

    def optim_step(
        self,
        optim_params: OptimParams | Mapping[str, Any] | None = None,
        *,
        adam_params: AdamParams | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Take one optimizer step with the accumulated gradient and clear it. Parameters
        of another family, or a mapping with a `type`, are for a model of that optimizer."""
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, not both")
        params = adam_params if optim_params is None else optim_params
        if params is None:
            raise TypeError("optim_step needs AdamParams")
        others = params.to_json_dict() if isinstance(params, WireModel) else dict(params)
        body = OptimStepRequest(
            model_id=self.model_id,
            adam_params=params if isinstance(params, AdamParams) else None,
            optimizer_params=None if isinstance(params, AdamParams) else others,
        )
        return self._ordered_post("optim_step", body, OptimStepResponse, "OptimStep")

    optim_step_async = async_call(optim_step)

    # ---- checkpoints

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state under `name`, to resume training from. Fails where the
        name exists, unless `overwrite`; ttl_seconds None: kept until deleted."""
        body = SaveWeightsRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=None if user_metadata is None else dict(user_metadata),
        )
        return self._ordered_post("save_weights", body, SaveWeightsResponse, "SaveWeights")

    save_state_async = async_call(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save the weights only, to sample from. ttl_seconds None: kept until deleted."""
        body = SaveWeightsForSamplerRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            user_metadata=None if user_metadata is None else dict(user_metadata),
        )
        return self._save_for_sampler(body)

    save_weights_for_sampler_async = async_call(save_weights_for_sampler)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Save the weights as other programs read them: PEFT's files, or a Hugging Face folder.
        Every file is encrypted to the age_encryption_recipients (age1... or SSH keys), if any."""
        body = SaveWeightsExternalRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._ordered_post(
            "save_weights_external", body, SaveWeightsExternalResponse, "SaveWeightsExternal"
        )

    save_weights_external_async = async_call(save_weights_external)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Put saved weights into this model; its optimizer starts anew."""
        return self._load_state(path, False, weights_access_token)

    load_state_async = async_call(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Put saved weights and saved optimizer state into this model."""
        return self._load_state(path, True, weights_access_token)

    load_state_with_optimizer_async = async_call(load_state_with_optimizer)

    def _load_state(
        self, path: str, optimizer: bool, weights_access_token: str | None
    ) -> APIFuture[LoadWeightsResponse]:
        body = LoadWeightsRequest(
            model_id=self.model_id,
            path=path,
            optimizer=optimizer,
            weights_access_token=weights_access_token,
        )
        return self._ordered_post("load_weights", body, LoadWeightsResponse, "LoadWeights")

    # ---- samplers

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> ClientFuture[SamplingClient]:
        """A sampling client of the weights after the calls so far. Without a name they are not
        kept beyond the session. kind "inflight": the client follows later inflight saves.
        retry_config, record_stability_info: as of ServiceClient.create_sampling_client."""
        body = SaveWeightsForSamplerRequest(model_id=self.model_id, path=name, kind=kind)
        if name is None:
            body.sampling_session_seq_id = self._session.next_sampling_session_seq_id()
        options = SamplingOptions(retry_config, record_stability_info)
        return self._session.submit_client(
            self._open_sampler(self._save_for_sampler(body), options)
        )

    save_weights_and_get_sampling_client_async = async_result(save_weights_and_get_sampling_client)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[SamplingClient]:
        """A sampling client of saved weights; arguments as of ServiceClient's."""
        options = SamplingOptions(retry_config, record_stability_info)
        sampler = open_sampling_client(self._session, model_path=model_path, options=options)
        return self._session.submit_client(sampler)

    create_sampling_client_async = async_result(create_sampling_client)

    async def _open_sampler(
        self, future: APIFuture[SaveWeightsForSamplerResponse], options: SamplingOptions
    ) -> SamplingClient:
        reply = await future
        if reply.sampling_session_id is None:
            return await open_sampling_client(self._session, model_path=reply.path, options=options)
        model = self._info.model_data
        sampler = Sampler(reply.sampling_session_id, model.model_name or "", model.tokenizer_id)
        return SamplingClient(self._session, sampler, options)

    def _save_for_sampler(
        self, body: SaveWeightsForSamplerRequest
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        path, reply = "save_weights_for_sampler", SaveWeightsForSamplerResponse
        return self._ordered_post(path, body, reply, "SaveWeightsForSampler")

    # ---- about the model

    def get_info(self) -> GetInfoResponse:
        """The model's description when this client was created; sends no request."""
        return self._info

    get_info_async = async_call(get_info)

    def get_tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer. Needs transformers."""
        tokenizer_id = self._info.model_data.tokenizer_id or self._info.model_data.model_name
        if tokenizer_id is None:
            raise TinkerError(f"the server names no tokenizer for model {self.model_id!r}")
        return load_tokenizer(tokenizer_id)

    # ---- requests

    def _ordered_post(
        self, path: str, body: Any, reply: type[ModelT], request_type: RequestType
    ) -> APIFuture[ModelT]:
        async def collect(request_id: str) -> ModelT:
            work = Work(request_id, request_type, self.model_id)
            return await self._session.result(work, reply, self._queue_log)

        return self._ordered(lambda: self._post(path, body), collect)

    def _ordered(
        self,
        post: Operation[AckT],
        collect: Callable[[AckT], Coroutine[Any, Any, T]],
    ) -> APIFuture[T]:
        """Post in the lane and collect outside of it, so that the next operation is posted without
        waiting for this result."""
        acknowledgement = self._lane.submit(post)

        async def result() -> T:
            return await collect(await asyncio.wrap_future(acknowledgement))

        return self._session.submit(result())

    async def _post(self, path: str, body: Any) -> str:
        """The request id. Retries repeat the same sequence number: the server executes it once."""
        request = body.replace(seq_id=self._lane.next_seq_id())
        acknowledgement = await self._session.transport.post(path, request, UntypedAPIFuture)
        return acknowledgement.request_id

    def _batch(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        config: LossFnConfig | None,
        *,
        forward_only: bool = False,
    ) -> list[codec.ForwardBackwardRequest]:
        """The requests of one call, before their sequence numbers are assigned."""
        whole = codec.ForwardBackwardRequest(
            self.model_id, 0, (), loss_fn, dict(config or {}), forward_only
        )
        return batch_requests(whole, data, self._session.config)

    async def _post_batch(self, batch: list[codec.ForwardBackwardRequest]) -> list[Work]:
        """What was acknowledged, in order."""
        posted: list[Work] = []
        for unnumbered in batch:
            request = dataclasses.replace(unnumbered, seq_id=self._lane.next_seq_id())
            acknowledgement = await self._session.transport.post_protobuf(
                "forward_backward",
                codec.encode_forward_backward_request(request),
                UntypedAPIFuture,
                compress=bool(self._session.config.proto_compress_fwdbwd),
            )
            request_type = "Forward" if request.forward_only else "ForwardBackward"
            posted.append(Work(acknowledgement.request_id, request_type, self.model_id))
        return posted

    async def _collect(self, posted: list[Work]) -> ForwardBackwardOutput:
        polls = [
            self._session.retrieve(work, decode_output, protobuf=True, on_queue=self._queue_log)
            for work in posted
        ]
        return merge_outputs(await asyncio.gather(*polls))

    async def _post_custom(
        self,
        data: list[Datum],
        loss_fn: CustomLossFn,
        forward: list[codec.ForwardBackwardRequest],
    ) -> tuple[list[Work], LocalLoss]:
        """Holds the lane until the backward pass is acknowledged: operations that the caller
        submits meanwhile must run after it."""
        output = await self._collect(await self._post_batch(forward))
        local = await asyncio.to_thread(differentiate, data, loss_fn, output)
        backward = self._batch(local.data, "cross_entropy", None)
        return await self._post_batch(backward), local

    async def _collect_custom(
        self, backward: tuple[list[Work], LocalLoss]
    ) -> ForwardBackwardOutput:
        posted, local = backward
        return with_local_metrics(await self._collect(posted), local)
