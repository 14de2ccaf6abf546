"""Request bodies, in the order of the wire specification's endpoint table (section 3)."""

from typing import Any, Literal

from pydantic import Field

from tinker_gmi.bodies.optimizers import AdamParams, adamw
from tinker_gmi.bodies.tensors import Datum, ModelInput, TensorData
from tinker_gmi.bodies.wire_model import WireModel

ModelID = str
RequestID = str
SamplingClientKind = Literal["snapshot", "inflight"]
LossFnType = str
"""A loss by its name: cross_entropy, importance_sampling, ppo, cispo, dro, gspo, ...

Any string on the wire: an unknown loss fails its future with the list of supported losses."""


class ClientConfigRequest(WireModel):
    """Body of client/config and client/dynamic_config."""

    sdk_version: str = ""


class AuthTokenRequest(WireModel):
    """Body of auth/token: an empty object."""


class CreateSessionRequest(WireModel):
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(WireModel):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(WireModel):
    type: str  # "success" | "errored" | "interrupted"


class FinishSessionRequest(WireModel):
    reason: FinishReason
    detail: str | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """Here a None is sent (specification 2.5)."""
        return self.model_dump(mode="json")


class TelemetrySendRequest(WireModel):
    """Anything is accepted."""

    events: list[Any] = Field(default_factory=list)
    platform: str | None = None
    sdk_version: str | None = None
    session_id: str | None = None
    process_uuid: str | None = None


class LoraConfig(WireModel):
    """rank 0 means full-parameter training (an extension of this server)."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(WireModel):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] = Field(default_factory=adamw)
    type: Literal["create_model"] = "create_model"


class LoadWeightsRequest(WireModel):
    """Either session_id + model_seq_id (creates the model), or model_id + seq_id (legacy)."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = Field(default=None, repr=False)
    type: Literal["load_weights"] = "load_weights"

    @property
    def creates_model(self) -> bool:
        return self.session_id is not None and self.model_seq_id is not None


class GetInfoRequest(WireModel):
    model_id: str
    type: Literal["get_info"] = "get_info"


class ForwardBackwardInput(WireModel):
    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardRequest(WireModel):
    """JSON form of older SDKs and of curl; current SDKs send protobuf."""

    model_id: str
    forward_backward_input: ForwardBackwardInput
    seq_id: int | None = None


class ForwardRequest(WireModel):
    """JSON form of older SDKs and of curl; current SDKs send forward_backward with a flag."""

    model_id: str
    forward_input: ForwardBackwardInput
    seq_id: int | None = None


class OptimStepRequest(WireModel):
    """adam_params for adamw; optimizer_params, with a `type`, for other optimizers."""

    model_id: str
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeightsRequest(WireModel):
    model_id: str
    path: str | None = None  # a name, not a file path
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(WireModel):
    """Named (path), or ephemeral (sampling_session_seq_id)."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: SamplingClientKind = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(WireModel):
    """age_encryption_recipients: public keys, age1... or of SSH; files are encrypted to them."""

    model_id: str
    path: str  # a name, not a file path
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class CreateSamplingSessionRequest(WireModel):
    """speculate: false turns speculative decoding off for the session; only the time changes.
    detailed: the server writes down where drafts of its samples were wrong."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    speculate: bool = True
    detailed: bool = False
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingClientRequest(WireModel):
    """Body of create_sampling_client, for curl; without session_id the server creates a session.

    speculate, detailed: as in CreateSamplingSessionRequest.
    """

    base_model: str | None = None
    model_path: str | None = None
    session_id: str | None = None
    speculate: bool = True
    detailed: bool = False


class JoinSamplingSessionRequest(WireModel):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class SamplingParams(WireModel):
    """stop: None stops at EOS, [] never stops before max_tokens. max_tokens None: up to the
    context limit. seed: any integer. min_p and the penalties: beyond the official client, which
    does not send them; None: 0."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class SampleRequest(WireModel):
    """One of sampling_session_id, model_path, base_model names the weights."""

    prompt: ModelInput
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class FutureRetrieveRequest(WireModel):
    request_id: str
    allow_metadata_only: bool = False


class SamplingSessionFuturesTarget(WireModel):
    """One client of a sampling session; cloned_sampler_id is its seq_ids // 1_000_000_000."""

    sampling_session_id: str
    cloned_sampler_id: int = 0
    type: Literal["sampling_session"] = "sampling_session"


class FuturesRetrieveRequest(WireModel):
    """timeout None: the server's own; 0: answer at once."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = Field(default=0, ge=0, le=2**62)
    timeout: float | None = None
    retrieved_request_ids: list[str] = Field(default_factory=list)


class CancelFutureRequest(WireModel):
    request_id: str


class WeightsInfoRequest(WireModel):
    tinker_path: str


class CopyWeightsRequest(WireModel):
    """Where to: destination_project_id, or session_id and model_seq_id."""

    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = Field(default=None, repr=False)


class SetTtlRequest(WireModel):
    ttl_seconds: int | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """Here a None is sent: it clears the limit."""
        return self.model_dump(mode="json")


class DeleteModelRequest(WireModel):
    """Frees a model's state; its checkpoints stay. SDKs up to 0.25 call it unload_model."""

    model_id: str
    type: Literal["delete_model", "unload_model"] = "delete_model"


class CleanupFuturesRequest(WireModel):
    """Delete finished results: those listed, or all of a model's. Pending futures are kept."""

    request_ids: list[str] | None = None
    model_id: str | None = None
