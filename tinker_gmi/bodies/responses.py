"""JSON response bodies, in the order of the wire specification's endpoint table (section 3)."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field

from tinker_gmi.bodies.wire_model import WireModel

CheckpointType = Literal["training", "sampler", "external"]
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

CHECKPOINT_SEGMENTS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""The checkpoint type for the middle segment of a tinker:// path."""


class ClientConfigResponse(WireModel):
    """Flags (specification 2.1). None is not sent: the client's default applies."""

    pjwt_auth_enabled: bool | None = None
    credential_default_source: str | None = None
    parallel_fwdbwd_chunks: bool | None = None
    proto_compress_fwdbwd: bool | None = None
    fwdbwd_max_chunk_len: int | None = None
    fwdbwd_max_chunk_bytes_count: int | None = None
    fwdbwd_dispatch_bytes_semaphore_size: int | None = None
    sample_dispatch_bytes_semaphore_size: int | None = None
    inflight_response_bytes_semaphore_size: int | None = None
    billing_exception_max_pause_duration_sec: int | None = None
    sample_no_retries: bool | None = None
    sample_enable_stuck_detection: bool | None = None
    sample_max_concurrent_requests: int | None = None
    use_pyqwest_transport: bool | None = None
    sample_use_retrieve_futures: bool | None = None
    custom_loss_server_side: bool | None = None
    sample_join_sampling_session: bool | None = None


class ClientDynamicConfigResponse(WireModel):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True  # an abandoned sample would be computed for nobody
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(WireModel):
    jwt: str


class CreateSessionResponse(WireModel):
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatResponse(WireModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSessionResponse(WireModel):
    type: Literal["finish_session"] = "finish_session"


class TelemetryResponse(WireModel):
    status: Literal["accepted"] = "accepted"


class SupportedModel(WireModel):
    model_name: str | None = None
    max_context_length: int | None = None  # tokens
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(WireModel):
    supported_models: list[SupportedModel]


class HealthResponse(WireModel):
    status: Literal["ok"] = "ok"


class UntypedAPIFuture(WireModel):
    """The acknowledgement of queued work. sample_sequence_ids: one per sample, for asample."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class CreateModelResponse(WireModel):
    model_id: str
    type: Literal["create_model"] = "create_model"


class LoadWeightsResponse(WireModel):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = "load_weights"


class ModelData(WireModel):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(WireModel):
    model_id: str
    model_data: ModelData
    optimizer_config: dict[str, Any] = Field(default_factory=lambda: {"type": "adamw"})
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None
    type: Literal["get_info"] | None = "get_info"


class OptimStepResponse(WireModel):
    metrics: dict[str, float] | None = None
    type: Literal["optim_step"] | None = "optim_step"


class SaveWeightsResponse(WireModel):
    path: str
    type: Literal["save_weights"] | None = "save_weights"


class SaveWeightsForSamplerResponse(WireModel):
    """path for a named save; sampling_session_id for an ephemeral one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = "save_weights_for_sampler"


class SaveWeightsExternalResponse(WireModel):
    path: str
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = "save_weights_external"


class CreateSamplingSessionResponse(WireModel):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionResponse(WireModel):
    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class GetSamplerResponse(WireModel):
    """tokenizer_id is an extension: the tokenizer to load, where base_model does not name it."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
    tokenizer_id: str | None = None


class RequestErrorCategory(StrEnum):
    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("unknown")


class RequestFailedResponse(WireModel):
    """A future that failed; retries do not help."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


class TryAgainResponse(WireModel):
    """A future that is pending."""

    request_id: str
    queue_state: QueueState = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class FutureCompletion(WireModel):
    """state "finished" has the size of the payload that retrieve_future will answer with."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FuturesRetrieveResponse(WireModel):
    completions: list[FutureCompletion]
    cursor: int


class FutureStatusResponse(WireModel):
    """The answer of `retrieve_future/{request_id}`, for curl."""

    request_id: str
    status: Literal["pending", "completed", "failed"]
    result: dict[str, Any] | None = None


class WeightsInfoResponse(WireModel):
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: dict[str, Any] | None = None


class ParsedCheckpointTinkerPath(WireModel):
    """`tinker://RUN/SEGMENT/NAME` in parts; checkpoint_id is `SEGMENT/NAME`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Raises ValueError for any other form."""
        parts = tinker_path.removeprefix("tinker://").split("/")
        if not tinker_path.startswith("tinker://") or len(parts) != 3 or not all(parts):
            raise ValueError(f"{tinker_path!r} is not of the form tinker://RUN/SEGMENT/NAME")
        run, segment, name = parts
        if segment not in CHECKPOINT_SEGMENTS:
            segments = ", ".join(CHECKPOINT_SEGMENTS)
            raise ValueError(f"{segment!r} in {tinker_path!r} is none of: {segments}")
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=CHECKPOINT_SEGMENTS[segment],
            checkpoint_id=f"{segment}/{name}",
        )


class Checkpoint(WireModel):
    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime  # with its zone
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class TrainingRun(WireModel):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime  # with its zone
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class Cursor(WireModel):
    offset: int
    limit: int
    total_count: int


class TrainingRunsResponse(WireModel):
    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointsListResponse(WireModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ExternalWeightsUrlsResponse(WireModel):
    """urls: file -> a link that needs no key and ends with `expires`."""

    urls: dict[str, str]
    expires: datetime  # with its zone


class CheckpointArchiveUrlResponse(WireModel):
    url: str
    expires: datetime  # with its zone


class CopyWeightsResponse(WireModel):
    tinker_path: str


class DeleteModelResponse(WireModel):
    model_id: str
    type: Literal["delete_model"] = "delete_model"


class CleanupFuturesResponse(WireModel):
    num_deleted: int
