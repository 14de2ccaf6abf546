"""RestClient: what the server keeps of sessions, training runs, samplers and checkpoints."""

import asyncio
import json
import uuid
from typing import Literal

from tinker_gmi.admin_client import AdminClient
from tinker_gmi.async_methods import async_result
from tinker_gmi.connection import settings
from tinker_gmi.connection.credentials import jwt_claims
from tinker_gmi.connection.errors import APIResponseValidationError, TinkerError
from tinker_gmi.connection.futures import APIFuture
from tinker_gmi.connection.session import Session
from tinker_gmi.connection.transport import IDEMPOTENCY_KEY, Call
from tinker_gmi.types import (
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    GetSamplerResponse,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    ListSessionsResponse,
    ModelID,
    ParsedCheckpointTinkerPath,
    SessionSearchRequest,
    SessionSearchResponse,
    SetProjectRequest,
    SetTtlRequest,
    TraceExportResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
    WhoamiResponse,
    WireModel,
)

AccessScope = Literal["owned", "accessible"]

TRACE_POLL_PERIOD_S = 5.0
WEIGHTS_ACCESS_TOKEN = "X-Tinker-Weights-Access-Token"


class RestClient(AdminClient):
    """Sessions, training runs, samplers and checkpoints; and what AdminClient has."""

    # ---- the server, the caller

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """The models that the server supports."""
        return self._get("get_server_capabilities", GetServerCapabilitiesResponse)

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """The caller, from the claims of the token that the server gives for the key."""
        return self._session.submit(self._whoami())

    # ---- sessions

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Ids of sessions, the newest first."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._get("sessions", ListSessionsResponse, query)

    list_sessions_async = async_result(list_sessions)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Sessions that pass every filter of the request, the newest first."""
        post = self._session.post("sessions/search", request, SessionSearchResponse)
        return self._submit(post)

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """The training runs and samplers of a session."""
        query = {"access_scope": access_scope}
        return self._get(f"sessions/{session_id}", GetSessionResponse, query)

    get_session_async = async_result(get_session)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session into a project."""
        body = SetProjectRequest(project_id=project_id)
        return self._change("PUT", f"sessions/{session_id}/project", body)

    assign_session_project_async = async_result(assign_session_project)

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """A link to the session's timeline in Perfetto's format, once the server has made it."""
        return self._session.submit(self._trace_url(session_id))

    export_session_trace_async = async_result(export_session_trace)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """The weights of a sampler."""
        return self._get(f"samplers/{sampler_id}", GetSamplerResponse)

    get_sampler_async = async_result(get_sampler)

    # ---- training runs

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """Training runs, the newest first. project_id None: of all projects."""
        query = {
            "limit": limit,
            "offset": offset,
            "access_scope": access_scope,
            "project_id": project_id,
        }
        return self._get("training_runs", TrainingRunsResponse, query)

    list_training_runs_async = async_result(list_training_runs)

    def get_training_run(
        self, training_run_id: ModelID, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """One training run."""
        query = {"access_scope": access_scope}
        return self._get(f"training_runs/{training_run_id}", TrainingRun, query)

    get_training_run_async = async_result(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The training run that saved a checkpoint."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        return self.get_training_run(parsed.training_run_id, access_scope)

    get_training_run_by_tinker_path_async = async_result(get_training_run_by_tinker_path)

    # ---- checkpoints

    def list_checkpoints(self, training_run_id: ModelID) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a training run."""
        return self._get(f"training_runs/{training_run_id}/checkpoints", CheckpointsListResponse)

    list_checkpoints_async = async_result(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[CheckpointsListResponse]:
        """The caller's checkpoints of all training runs, the newest first."""
        query = {"limit": limit, "offset": offset}
        return self._get("checkpoints", CheckpointsListResponse, query)

    list_user_checkpoints_async = async_result(list_user_checkpoints)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """The base model and adapter of a checkpoint."""
        body = WeightsInfoRequest(tinker_path=tinker_path)
        return self._submit(self._session.post("weights_info", body, WeightsInfoResponse))

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """A link to each file of weights that `save_weights_external` saved."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        if parsed.checkpoint_type != "external":
            raise ValueError(
                f"{tinker_path!r} is a {parsed.checkpoint_type} checkpoint; only those of "
                "save_weights_external (tinker://RUN/external_weights/NAME) have links"
            )
        path = f"{_checkpoint_path(parsed)}/external_weights_urls"
        return self._get(path, ExternalWeightsUrlsResponse)

    get_external_weights_urls_async = async_result(get_external_weights_urls)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project, by default TINKER_PROJECT_ID; the path of the copy."""
        project_id = settings.project_id(destination_project_id)
        if project_id is None:
            raise ValueError("give destination_project_id, or set TINKER_PROJECT_ID")
        request = CopyWeightsRequest(
            source_path=path, destination_project_id=project_id, ttl_seconds=ttl_seconds
        )
        return self._session.submit(copy_weights(self._session, request, weights_access_token))

    copy_weights_async = async_result(copy_weights)

    def delete_checkpoint(self, training_run_id: ModelID, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint; checkpoint_id: `weights/NAME` or `sampler_weights/NAME`."""
        return self._change(
            "DELETE", f"training_runs/{training_run_id}/checkpoints/{checkpoint_id}"
        )

    delete_checkpoint_async = async_result(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint."""
        return self._change_checkpoint("DELETE", tinker_path)

    delete_checkpoint_from_tinker_path_async = async_result(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let every user of the server read a checkpoint."""
        return self._change_checkpoint("POST", tinker_path, "/publish")

    publish_checkpoint_from_tinker_path_async = async_result(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let only its owner read a checkpoint again."""
        return self._change_checkpoint("DELETE", tinker_path, "/publish")

    unpublish_checkpoint_from_tinker_path_async = async_result(
        unpublish_checkpoint_from_tinker_path
    )

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Delete a checkpoint in ttl_seconds; None: keep it until it is deleted."""
        body = SetTtlRequest(ttl_seconds=ttl_seconds)
        return self._change_checkpoint("PUT", tinker_path, "/ttl", body)

    set_checkpoint_ttl_from_tinker_path_async = async_result(set_checkpoint_ttl_from_tinker_path)

    # ---- requests

    def _change_checkpoint(
        self, method: str, tinker_path: str, suffix: str = "", body: WireModel | None = None
    ) -> APIFuture[None]:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        return self._change(method, _checkpoint_path(parsed) + suffix, body)

    def _change(self, method: str, path: str, body: WireModel | None = None) -> APIFuture[None]:
        content = b"" if body is None else json.dumps(body.to_json_dict()).encode()

        async def send() -> None:
            await self._session.configured()
            await self._session.transport.send(Call(method, path, content))

        return self._session.submit(send())

    async def _trace_url(self, session_id: str) -> str:
        path = f"sessions/{session_id}/trace_export"
        while True:
            export = await self._session.get(path, TraceExportResponse)
            if export.status == "ready" and export.url is not None:
                return export.url
            if export.status != "pending":
                raise TinkerError(f"the trace of session {session_id}: {export.error}")
            await asyncio.sleep(TRACE_POLL_PERIOD_S)

    async def _whoami(self) -> WhoamiResponse:
        claims = jwt_claims(await self._session.token())
        if not {"sub", "org_id"} <= set(claims):
            raise APIResponseValidationError("the server's token lacks the claims sub and org_id")
        return WhoamiResponse(
            user_urn=claims["sub"],
            org_urn=f"tml:organization:{claims['org_id']}",
            email=claims.get("email") or None,
        )


async def copy_weights(session: Session, request: CopyWeightsRequest, token: str | None) -> str:
    """The path of the copy. Retries repeat one key, so that there is one copy."""
    headers = {IDEMPOTENCY_KEY: str(uuid.uuid4())}
    if token is not None:
        headers[WEIGHTS_ACCESS_TOKEN] = token
    reply = await session.transport.post(
        "copy_weights", request, CopyWeightsResponse, headers=headers
    )
    return reply.tinker_path


def _checkpoint_path(parsed: ParsedCheckpointTinkerPath) -> str:
    return f"training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}"
