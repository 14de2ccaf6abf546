"""tinker_gmi: a light Python client of the Tinker training API.

The names, arguments and results are those of the official client, so that
`import tinker_gmi as tinker` is all that a script needs. It depends on httpx, numpy, protobuf and
pydantic; torch and transformers are loaded only by calls that need them.
"""

from tinker_gmi import types
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
from tinker_gmi.connection.progress import Progress
from tinker_gmi.connection.retries import RetryConfig, RetryPolicy
from tinker_gmi.rest_client import RestClient
from tinker_gmi.sampling_client import SamplingClient
from tinker_gmi.service_client import ServiceClient
from tinker_gmi.training_client import TrainingClient
from tinker_gmi.types import (
    AdamParams,
    Checkpoint,
    CheckpointType,
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    LoraConfig,
    ModelID,
    ModelInput,
    ModelInputChunk,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
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

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ClientFuture",
    "ConflictError",
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "ImageChunk",
    "InternalServerError",
    "LoraConfig",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "RetryPolicy",
    "SampleRequest",
    "SampleResponse",
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
    "__version__",
    "types",
]
