"""Bodies about accounts: keys, usage, the audit log, and the search for sessions."""

from typing import Any, Literal

from pydantic import AwareDatetime, Field

from tinker_gmi.bodies.session_statuses import SearchOwner, SessionStatus, SessionStatusQuery
from tinker_gmi.bodies.wire_model import WireModel


class NamedDetails(WireModel):
    name: str


class UserDetails(WireModel):
    email: str


class ApiKeyDetails(WireModel):
    org_details: NamedDetails
    user_details: UserDetails


class ApiKeyMeResponse(WireModel):
    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class SetProjectRequest(WireModel):
    project_id: str | None = None


class SessionSearchCursor(WireModel):
    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(WireModel):
    """Every filter that is given must hold, but of session_id and display_name either will do."""

    session_id: str | None = None
    project_ids: list[str] | None = Field(default=None, max_length=1000)
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(default=None, min_length=1, max_length=1000)
    owner: SearchOwner = Field(default_factory=SearchOwner)
    statuses: list[SessionStatusQuery] | None = Field(default=None, min_length=1, max_length=10)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SessionSearchCursor | None = None


SessionState = Literal["active", "silent", "expired", "failed", "finished"]
"""silent: its client stopped without a word, and it has not expired yet."""


class SessionSummary(WireModel):
    session_id: str
    created_at: AwareDatetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    state: SessionState | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(WireModel):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class BillingEventInfo(WireModel):
    """By its type: training, sampling_prefill (cached), sampling_sample: token_count; checkpoint:
    count; storage: gigabyte_hours (wire specification, section 12)."""

    type: str
    token_count: int | None = None
    cached: bool | None = None
    count: int | None = None
    gigabyte_hours: float | None = None


class BillingUsageEvent(WireModel):
    """Costs come from the hosted service alone."""

    bucket_start: AwareDatetime
    bucket_end: AwareDatetime
    event_info: BillingEventInfo
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None


class BillingUsageSession(WireModel):
    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(WireModel):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default_factory=dict)
    cost_data_through: AwareDatetime | None = None


class CurrentCheckpointStorageUsageItem(WireModel):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(WireModel):
    data: list[CurrentCheckpointStorageUsageItem]
    effective_rate_usd_per_gigabyte_month: float | None = None


class AuditLogEntry(WireModel):
    timestamp: AwareDatetime
    event: str
    event_details: dict[str, Any] = Field(default_factory=dict[str, Any])
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(WireModel):
    entries: list[AuditLogEntry]


class WhoamiResponse(WireModel):
    user_urn: str
    org_urn: str
    email: str | None = None


class ListSessionsResponse(WireModel):
    sessions: list[str]


class GetSessionResponse(WireModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    project_id: str | None = None
    status: SessionStatus | None = None


class TraceExportResponse(WireModel):
    """url: once it is ready; error: where it failed."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None
