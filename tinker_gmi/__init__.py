"""tinker_gmi: a light Python client of the Tinker training API.

The names, arguments and results are those of the official client, so that
`import tinker_gmi as tinker` is all that a script needs. It depends on httpx, numpy, protobuf and
pydantic; torch and transformers are loaded only by calls that need them.
"""

from tinker_gmi import auth, types
from tinker_gmi.admin_client import AdminClient
from tinker_gmi.connection.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    TinkerError,
    UnprocessableEntityError,
)
from tinker_gmi.connection.futures import APIFuture, ClientFuture
from tinker_gmi.connection.progress import Progress, Work
from tinker_gmi.connection.retries import RetryConfig, RetryPolicy
from tinker_gmi.losses.traced_loss import LossHandle, PerDatumLossFn
from tinker_gmi.rest_client import RestClient
from tinker_gmi.sampling_client import SamplingClient
from tinker_gmi.service_client import ServiceClient
from tinker_gmi.training_client import TrainingClient
from tinker_gmi.types import (
    AdamOptimizerConfig,
    AdamParams,
    Checkpoint,
    CheckpointType,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    LoraConfig,
    ModelID,
    ModelInput,
    ModelInputChunk,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    StopReason,
    TensorData,
    TensorDtype,
    TrainingRun,
)
from tinkercloud import __version__

BackcompatTrainingClientFuture = ClientFuture[TrainingClient]
BackcompatSamplingClientFuture = ClientFuture[SamplingClient]


class ExperimentalWarning(FutureWarning):
    """Never emitted here; scripts name it in their filters."""


__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ClientFuture",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "ImageChunk",
    "InternalServerError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "Progress",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "RetryConfig",
    "RetryPolicy",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "Work",
    "__version__",
    "auth",
    "types",
]
