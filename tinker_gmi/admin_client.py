"""AdminClient: usage and the audit log; the base of RestClient."""

from collections.abc import Coroutine, Mapping
from datetime import date, datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import httpx

from tinker_gmi.async_methods import async_result
from tinker_gmi.connection import settings
from tinker_gmi.connection.closing import ClosesOnExit
from tinker_gmi.connection.futures import APIFuture
from tinker_gmi.connection.retries import RetryPolicy
from tinker_gmi.connection.session import Session
from tinker_gmi.connection.transport import Transport
from tinker_gmi.types import (
    AuditLogResponse,
    BillingUsageResponse,
    CreateSessionRequest,
    CurrentCheckpointStorageUsageResponse,
    WireModel,
)
from tinkercloud import __version__

ModelT = TypeVar("ModelT", bound=WireModel)
AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AdminClient(ClosesOnExit):
    """Usage and the audit log. base_url, api_key, http_transport and retry: as of ServiceClient.

    Starts no session on the server. `close`, or use as a context manager, where it was constructed
    directly; a client of `ServiceClient.create_rest_client` ends with its ServiceClient.
    """

    def __init__(
        self,
        _session: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
        retry: RetryPolicy | None = None,
    ):
        if _session is not None and (base_url is not None or api_key is not None):
            raise ValueError("a session has its address and key: give it, or base_url and api_key")
        self._owns_session = _session is None
        self._session = _session or _unstarted(
            Transport(
                settings.base_url(base_url),
                settings.api_key(api_key),
                f"tinker_gmi/{__version__}",
                http_transport,
                retry,
            )
        )

    def close(self) -> None:
        """Close the connections, if they are this client's own. Idempotent."""
        if self._owns_session:
            self._session.close("success", None)

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """What was done on the account on one day of UTC; None: today."""
        query = {"event_type": event_type, "day": None if day is None else day.isoformat()}
        return self._get("audit", AuditLogResponse, query)

    get_audit_log_async = async_result(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """What was used between two UTC hours, at most 14 days apart; the second is excluded."""
        query = {"starting_on": _rfc3339(starting_on), "ending_before": _rfc3339(ending_before)}
        return self._get("billing/usage/events", BillingUsageResponse, query)

    get_billing_usage_async = async_result(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """How many checkpoints are stored, and their bytes."""
        path = "billing/usage/checkpoints/current"
        return self._get(path, CurrentCheckpointStorageUsageResponse, {"project_id": project_id})

    get_current_checkpoint_storage_usage_async = async_result(get_current_checkpoint_storage_usage)

    # ---- requests

    def _get(
        self, path: str, reply: type[ModelT], query: Mapping[str, Any] | None = None
    ) -> APIFuture[ModelT]:
        values = {name: value for name, value in (query or {}).items() if value is not None}
        full_path = f"{path}?{urlencode(values)}" if values else path
        return self._submit(self._session.get(full_path, reply))

    def _submit(self, coroutine: Coroutine[Any, Any, ModelT]) -> APIFuture[ModelT]:
        return self._session.submit(coroutine)


def _rfc3339(time: datetime | str) -> str:
    return time if isinstance(time, str) else time.isoformat()


def _unstarted(transport: Transport) -> Session:
    """Its event loop and transport only: no call here starts a session on the server."""
    return Session(transport, CreateSessionRequest(sdk_version=__version__))
