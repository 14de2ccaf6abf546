"""ServiceClient: a session with a server, and the clients that it creates."""

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import httpx

from tinker_gmi.async_methods import async_result
from tinker_gmi.connection import settings
from tinker_gmi.connection.futures import APIFuture, ClientFuture
from tinker_gmi.connection.progress import ProgressCallback
from tinker_gmi.connection.retries import RetryConfig, RetryPolicy
from tinker_gmi.connection.session import Session
from tinker_gmi.connection.transport import Transport
from tinker_gmi.losses.traced_loss import (
    LossHandle,
    PerDatumLossFn,
    encoded_graph,
    trace_loss,
)
from tinker_gmi.rest_client import RestClient, copy_weights
from tinker_gmi.sampling_client import SamplingClient, SamplingOptions, open_sampling_client
from tinker_gmi.training_client import TrainingClient
from tinker_gmi.types import (
    AdamOptimizerConfig,
    CopyWeightsRequest,
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    CreateModelRequest,
    CreateModelResponse,
    CreateSessionRequest,
    CustomLossInputRank,
    GetInfoRequest,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LoraConfig,
    OptimizerConfig,
)
from tinkercloud import __version__


class ServiceClient:
    """Creates training and sampling clients. Contacts the server at first use.

    base_url: by default TINKER_BASE_URL, then http://127.0.0.1:8700. api_key: by default
    TINKER_API_KEY; any text. http_transport replaces the network, in tests for example.
    on_progress: called with a Progress whenever something becomes of a request, on the client's
    own thread: it must return soon.

    The create methods without `_async` return a future that can be used as the client. Call
    `close`, or use it as a context manager.
    """

    def __init__(  # noqa: PLR0913 - the official signature, and three of our own
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
        retry: RetryPolicy | None = None,
        on_progress: ProgressCallback | None = None,
    ):
        request = CreateSessionRequest(
            tags=settings.tags(),
            user_metadata=None if user_metadata is None else dict(user_metadata),
            sdk_version=__version__,
            project_id=settings.project_id(project_id),
            display_name=display_name,
        )
        transport = Transport(
            settings.base_url(base_url),
            settings.api_key(api_key),
            f"tinker_gmi/{__version__}",
            http_transport,
            retry,
        )
        self._session = Session(transport, request, on_progress=on_progress)

    def get_console_url(self) -> str:
        """The server's page about this session; about all sessions before it has started."""
        root, session_id = self._session.transport.base_url, self._session.started_id
        return f"{root}/sessions" if session_id is None else f"{root}/sessions/{session_id}"

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The models that the server supports."""
        return self._capabilities().result()

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """The models that the server supports."""
        return await self._capabilities()

    def create_lora_training_client(  # noqa: PLR0913 - the official signature
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, Any] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        """Create a model with a new LoRA adapter on `base_model`. rank 0: all parameters are
        trained, no LoRA (this server only)."""
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        request = CreateModelRequest(
            session_id="",
            model_seq_id=0,
            base_model=base_model,
            user_metadata=_optional_dict(user_metadata),
            lora_config=lora,
            optimizer_config=(optimizer or AdamOptimizerConfig()).to_json_dict(),
        )
        client = self._create(request)
        return self._session.submit_client(client)

    create_lora_training_client_async = async_result(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        """Create a model with saved weights and a new optimizer state. optimizer: by default
        AdamW."""
        request = LoadWeightsRequest(
            path=path,
            optimizer=False,
            base_model=base_model,
            user_metadata=_optional_dict(user_metadata),
            weights_access_token=weights_access_token,
            optimizer_config=None if optimizer is None else optimizer.to_json_dict(),
        )
        return self._session.submit_client(self._load(request))

    create_training_client_from_state_async = async_result(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        weights_access_token: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        """Create a model with saved weights and saved optimizer state."""
        request = LoadWeightsRequest(
            path=path,
            optimizer=True,
            base_model=base_model,
            user_metadata=_optional_dict(user_metadata),
            weights_access_token=weights_access_token,
        )
        return self._session.submit_client(self._load(request))

    create_training_client_from_state_with_optimizer_async = async_result(
        create_training_client_from_state_with_optimizer
    )

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[SamplingClient]:
        """A sampling client of saved weights or of a base model: exactly one of the two.

        retry_config: None raises what a sample failed with, once the server was out of reach for
        five minutes. record_stability_info: for the loss stable_reinforce."""
        sampler = open_sampling_client(
            self._session,
            model_path=model_path,
            base_model=base_model,
            options=SamplingOptions(retry_config, record_stability_info),
        )
        return self._session.submit_client(sampler)

    create_sampling_client_async = async_result(create_sampling_client)

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a loss of one datum, `fn(logprobs, *inputs) -> (loss, metrics)`, for
        `forward_backward_custom`, and upload it where the server runs such losses. input_ranks: the
        rank of each parameter, logprobs included. The datums' losses are summed. Raises ValueError
        where it uses more than torch and math. Needs torch."""
        return self._session.submit(self._upload(trace_loss(fn, input_ranks)))

    def create_rest_client(self) -> RestClient:
        """A client of what the server keeps; it ends with this one."""
        return RestClient(self._session)

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into the project of this session, as a training run of its own that
        cannot be trained; the path of the copy."""
        request = CopyWeightsRequest(source_path=path, ttl_seconds=ttl_seconds)
        return self._session.submit(self._copy(request, weights_access_token))

    def close(self, status: str = "success", detail: str | None = None) -> None:
        """End the session; status: "success", "errored" or "interrupted". Pending calls are
        cancelled. Idempotent."""
        self._session.close(status, detail)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.close("interrupted")
        else:
            self.close("errored", f"{kind.__name__}: {error}")

    def _capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        return self._session.submit(
            self._session.get("get_server_capabilities", GetServerCapabilitiesResponse)
        )

    async def _create(self, request: CreateModelRequest) -> TrainingClient:
        session_id = await self._session.session_id()
        model_seq_id = self._session.next_model_seq_id()
        request = request.replace(session_id=session_id, model_seq_id=model_seq_id)
        what = ("CreateModel", f"{session_id}:train:{model_seq_id}")
        model = await self._session.post_and_wait(
            "create_model", request, CreateModelResponse, what
        )
        return await self._training_client(model.model_id)

    async def _upload(self, handle: LossHandle) -> LossHandle:
        session_id = await self._session.session_id()
        handle = replace(handle, session_id=session_id)
        if not self._session.config.custom_loss_server_side:
            return handle
        request = CreateCustomLossRequest(
            session_id=session_id,
            custom_loss_seq_id=self._session.next_custom_loss_seq_id(),
            name=handle.name,
            inputs=[each.to_json_dict() for each in handle.inputs],
            graph=encoded_graph(handle).to_json_dict(),
        )
        reply = await self._session.post_and_wait(
            "create_custom_loss",
            request,
            CreateCustomLossResponse,
            ("CreateCustomLoss", session_id),
        )
        return replace(handle, loss_id=reply.loss_id)

    async def _copy(self, request: CopyWeightsRequest, token: str | None) -> str:
        session_id = await self._session.session_id()
        model_seq_id = self._session.next_model_seq_id()
        request = request.replace(session_id=session_id, model_seq_id=model_seq_id)
        return await copy_weights(self._session, request, token)

    async def _load(self, request: LoadWeightsRequest) -> TrainingClient:
        session_id = await self._session.session_id()
        model_seq_id = self._session.next_model_seq_id()
        request = request.replace(session_id=session_id, model_seq_id=model_seq_id)
        # The id follows from the request; the reply need not have it (specification 3.1).
        model_id = f"{session_id}:train:{model_seq_id}"
        await self._session.post_and_wait(
            "load_weights", request, LoadWeightsResponse, ("LoadWeights", model_id)
        )
        return await self._training_client(model_id)

    async def _training_client(self, model_id: str) -> TrainingClient:
        info = await self._session.transport.post(
            "get_info", GetInfoRequest(model_id=model_id), GetInfoResponse
        )
        return TrainingClient(self._session, info)


def _optional_dict(mapping: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if mapping is None else dict(mapping)
