"""The status of a session, as the official client names it, and queries for it."""

from typing import Annotated, Literal

from pydantic import Field

from tinker_gmi.bodies.wire_model import WireModel

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class SessionActive(WireModel):
    type: Literal["active"] = "active"


class SessionCancelled(WireModel):
    """Expired, in the word of the official client."""

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class SessionFailedRequestReason(WireModel):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(WireModel):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(WireModel):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason = Annotated[
    SessionFailedRequestReason
    | SessionFailedTrainingRunReason
    | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionFailed(WireModel):
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class ClientSessionFinishSuccess(WireModel):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(WireModel):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(WireModel):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Field(discriminator="type"),
]


class ClientSessionFinished(WireModel):
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


SessionStatus = Annotated[
    SessionActive | SessionCancelled | SessionFailed | ClientSessionFinished,
    Field(discriminator="type"),
]


class SearchOwner(WireModel):
    """accessible: every owner's sessions that the caller may see; user: those of owner_urns."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list, max_length=10)


class OwnSearchOwner(SearchOwner):
    """The caller's sessions."""


class AccessibleSearchOwner(SearchOwner):
    """Every session that the caller may see."""

    type: Literal["accessible"] = "accessible"  # type: ignore[assignment]


class UserSearchOwner(SearchOwner):
    """The sessions of these users."""

    type: Literal["user"] = "user"  # type: ignore[assignment]
    owner_urns: list[str] = Field(min_length=1, max_length=10)


class SessionStatusQuery(WireModel):
    """expired is cancelled, in the word for it. reasons: of client_finished; None: any."""

    type: Literal["active", "cancelled", "expired", "failed", "client_finished"]
    reasons: list[str] | None = None


class ActiveSessionStatusQuery(SessionStatusQuery):
    type: Literal["active"] = "active"  # type: ignore[assignment]


class CancelledSessionStatusQuery(SessionStatusQuery):
    type: Literal["cancelled"] = "cancelled"  # type: ignore[assignment]


class FailedSessionStatusQuery(SessionStatusQuery):
    type: Literal["failed"] = "failed"  # type: ignore[assignment]


class ClientFinishedSessionStatusQuery(SessionStatusQuery):
    type: Literal["client_finished"] = "client_finished"  # type: ignore[assignment]
