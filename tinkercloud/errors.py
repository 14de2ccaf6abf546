"""The exception tree of the server. Every class carries its text for the client.

    TinkercloudError            status 500, category "server"
    +-- UserError               status 400, category "user": the request is at fault
    |   +-- NotFound            status 404
    |   |   +-- ModelNotFound, BaseModelNotServed, SessionNotFound, SamplerNotFound,
    |   |       CheckpointNotFound, UnknownModelName, CaptureNotFound, LinkRefused
    |   +-- Forbidden           status 403
    |   +-- PayloadTooLarge     status 413
    |   +-- TooManyRequests, QuotaExceeded  status 429
    |   +-- PlanRefused         status 400: a model cannot be trained on these GPUs
    |   +-- SessionFinished, CaptureClosed  status 410
    |   +-- CaptureFull         status 400: no room for another turn
    |   +-- FutureUnknown       status 404 (training) or 410 (sampling)
    |   +-- InvalidRequest      status 422 at once, category "user" inside a future
    |   |   +-- InvalidField, ContextLengthExceeded
    |   +-- NumberTaken         status 400
    |   +-- GradientNotFinite, WeightsNotFinite  status 400: of an optim_step
    |   +-- RecoveryNotOffered  status 400: this backend's models do not come back
    +-- ServerFault             status 503: ours; the request may be right
    |   +-- ModelStateLost, VersionLost, EngineDied, CapacityTimeout, TrainingRewound,
    |       StorageFailed, DatabaseDamaged, StateCopyLost, StateDamaged, UpstreamUnreachable
    +-- UpstreamRefused, UpstreamAnswerInvalid  status 502: what an upstream of the proxy answers
    +-- UnknownRequest          the engine process has no handler for a request: a defect
    +-- ConfigError             raised before the server listens; never reaches HTTP

`status` is used when the error ends an HTTP request, `category` when it ends a future
(wire specification, section 4.2). 409 is never used: clients retry it for minutes (section 0).
"""

import errno
from collections.abc import Iterator
from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class TinkercloudError(Exception):
    """Base of everything the server raises on purpose."""

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"


class UserError(TinkercloudError):
    """The request cannot be served as it is; the text says what to change."""

    status = 400
    category = "user"


class InvalidRequest(UserError):
    """Wrong shapes, unknown losses, values out of range."""

    status = 422


class NumberTaken(UserError):
    """A request with the number of another one, and another body."""

    def __init__(self, kind: str, owner: str, seq_id: int | None):
        super().__init__(
            f"seq_id {seq_id} of {owner} was taken by another request than this {kind}: a number "
            "may be sent again with the same body alone. Nothing was done; count on from the "
            "highest number that you sent"
        )


class GradientNotFinite(UserError):
    def __init__(self) -> None:
        super().__init__(
            "the accumulated gradient is not finite; it was dropped and the weights are "
            "unchanged. Check advantages, logprobs and the learning rate"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


class MemoryShort(UserError):
    """needed, left: bytes."""

    def __init__(self, what: str, needed: int, left: int):
        super().__init__(
            f"{what} needs {_size(needed)} of memory, and {_size(left)} are left here; ask for a "
            "smaller rank or fewer tokens at once, or delete models and finish sessions that you "
            "do not need"
        )


class WeightsNotFinite(UserError):
    """fault: what would have no finite number. hyper: of the step."""

    def __init__(self, fault: str, hyper: object):
        super().__init__(
            f"this step would not leave finite numbers ({fault}) with {hyper}; it was refused, and "
            "the model is as before it, the accumulated gradient too. Step again with a lower "
            "learning rate, or with grad_clip_norm"
        )


class InvalidField(InvalidRequest):
    """field: the one of the request's body that is at fault."""

    def __init__(self, field: str, text: str):
        super().__init__(text)
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    """A prompt that leaves no room for a token."""


class RecoveryNotOffered(UserError):
    def __init__(self) -> None:
        super().__init__(
            "this backend keeps no copies of its models' states: they end with its process, and "
            "runs can be neither restored nor computed again on it"
        )


class TooManyRequests(UserError):
    """retry_after_s: when the client sends it again."""

    status = 429

    def __init__(self, text: str, *, retry_after_s: int = 1):
        super().__init__(text)
        self.retry_after_s = retry_after_s


class QuotaExceeded(UserError):
    """Of what stays until somebody removes it: sending it again at once is in vain."""

    status = 429


class NotFound(UserError):
    """Something named in the request does not exist (or is not the caller's)."""

    status = 404


class Forbidden(UserError):
    """The caller may not do this, whatever it sends."""

    status = 403


class ModelNotFound(NotFound):
    def __init__(self, model_id: str):
        super().__init__(f"model {model_id!r} does not exist; create it with create_model first")


class BaseModelNotServed(NotFound):
    """A base model that this server does not serve. status 400: a 404 would read as a wrong URL."""

    status = 400

    def __init__(self, name: str, served: tuple[str, ...]):
        super().__init__(
            f"base model {name!r} is not served here; served: {', '.join(served) or 'none'}. "
            f"Start the server with --model {name}=PATH to add it, or with --alias {name}=SERVED "
            "to reach a served one by this name"
        )


class PlanRefused(UserError):
    """No plan for this model on these GPUs. `reasons`: every fact against one."""

    def __init__(self, reasons: tuple[str, ...]):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class SessionNotFound(NotFound):
    def __init__(self, session_id: str):
        super().__init__(f"session {session_id!r} does not exist")


class SessionFinished(UserError):
    """410 stops the client's heartbeat loop (wire specification, section 2)."""

    status = 410

    def __init__(self, session_id: str):
        super().__init__(f"session {session_id!r} was finished; start a new one")


class SamplerNotFound(NotFound):
    def __init__(self, sampler_id: str):
        super().__init__(f"sampling session {sampler_id!r} does not exist")


class CheckpointNotFound(NotFound):
    def __init__(self, path: str):
        super().__init__(f"checkpoint {path!r} does not exist")


class CaptureNotFound(NotFound):
    def __init__(self, capture_id: str):
        super().__init__(f"capture session {capture_id[:200]!r} does not exist, or has expired")


class CaptureClosed(UserError):
    """No turn is added to what rewards may have been given for."""

    status = 410

    def __init__(self, name: str):
        super().__init__(f"{name} was closed; start another one for more turns")


class CaptureFull(UserError):
    """status 400: clients of the OpenAI and Anthropic routes repeat a 429."""


class TooManyMetrics(UserError):
    """Training scripts have reported more of their runs than is kept."""


class UnknownModelName(NotFound):
    """The `model` of a request to the OpenAI or Anthropic routes."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"model {name[:200]!r} is not found: {reason[:500]}")


class PayloadTooLarge(UserError):
    status = 413


class LinkRefused(NotFound):
    """A signed link that was changed, or has ended."""

    def __init__(self) -> None:
        super().__init__("this link is not valid, or has ended; ask for a new one")


class FutureUnknown(UserError):
    """404 for training; 410 for sampling: the client then samples again (wire specification,
    section 4.4)."""

    def __init__(self, request_id: str, *, sampling: bool):
        super().__init__(f"request {request_id!r} is unknown or its result has expired")
        self.sampling = sampling


class ServerFault(TinkercloudError):
    """Our fault; the same request may succeed later."""

    status = 503


class EngineDied(ServerFault):
    """The compute process ended while it held this request."""


NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Of an OSError: the disk takes nothing."""


class StorageFailed(ServerFault):
    """The data folder takes no writes."""

    def __init__(self, reason: str):
        super().__init__(
            f"the server's data folder cannot be written ({reason}): its operator must make room, "
            "or give the right to write there. What was acknowledged is kept; send this again then"
        )


class DatabaseDamaged(ServerFault):
    """A page of the database is not as it was written."""

    def __init__(self, reason: str):
        super().__init__(
            f"the server's database is damaged ({reason}): its operator must stop the server, move "
            "the file aside and restore a backup (tinkercloud restore). What checkpoints/ beside "
            "it holds is whole in itself"
        )


class CapacityTimeout(ServerFault):
    """No GPUs became free in time."""


class TrainingRewound(ServerFault):
    """The model is back at a saved state that is older than what was acknowledged."""


class ModelStateLost(ServerFault):
    """The model's weights were only in memory, and that memory is gone."""

    def __init__(self, model_id: str):
        super().__init__(
            f"the weights of model {model_id!r} were in memory when the engine or the server "
            "restarted; go on from your last checkpoint with create_training_client_from_state"
        )


class VersionLost(ServerFault):
    """A published weights version that the backend no longer holds."""

    def __init__(self, version: str):
        super().__init__(
            f"weights version {version!r} is gone: it was in memory when the engine or the server "
            "restarted, or unnamed and unused for long where more was published than the server "
            "keeps (published_bytes); publish it again with save_weights_for_sampler, under a name "
            "to keep it"
        )


class StateCopyLost(ServerFault):
    """A copy of a model's state that was written, replaced, or in the memory of another engine."""

    def __init__(self, copy: int):
        super().__init__(f"there is no copy {copy} of a model's state: it was written or replaced")


class StateDamaged(ServerFault):
    """A folder from which a model was to be restored is not as it was written."""

    def __init__(self, reason: str):
        super().__init__(f"the written state of this model cannot be used: {reason}")


class UnknownRequest(TinkercloudError):
    """The engine process received a request of a type that its handler table lacks."""

    def __init__(self, name: str):
        super().__init__(f"the engine process has no handler for requests of type {name}")


class UpstreamUnreachable(ServerFault):
    """An upstream of the proxy, or a pool, does not answer, or may not be asked."""


class UpstreamRefused(TinkercloudError):
    """An upstream of the proxy answered with an error. answer_status, answer: what it said."""

    status = 502

    def __init__(self, upstream: str, answer_status: int, answer: bytes):
        text = answer[:500].decode(errors="replace")
        super().__init__(f"{upstream} answered {answer_status}: {text}")
        self.answer_status = answer_status
        self.answer = answer


class UpstreamAnswerInvalid(TinkercloudError):
    """An upstream of the proxy, or a pool, answered in another form than its kind has, or of other
    tokens."""

    status = 502


class ConfigError(TinkercloudError):
    """A setting that cannot work; raised before the server listens."""


def _family(error_class: type[TinkercloudError]) -> Iterator[type[TinkercloudError]]:
    yield error_class
    for subclass in error_class.__subclasses__():
        yield from _family(subclass)


_BY_NAME = {error_class.__name__: error_class for error_class in _family(TinkercloudError)}


def error_of(
    name: str, text: str, default: type[TinkercloudError] = TinkercloudError
) -> TinkercloudError:
    """An error that another process raised, from its class name and its text. Names that are not
    in the tree above become `default`."""
    error_class = _BY_NAME.get(name, default)
    # The classes build their text from their arguments; `text` is built already.
    error = error_class.__new__(error_class)
    Exception.__init__(error, text)
    return error
