"""Errors in OpenAI's form, by which its clients choose what to raise and whether to try again."""

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
_BY_NAME = {
    "UnknownModelName": "model_not_found",
    "ContextLengthExceeded": "context_length_exceeded",
}


def error_body(
    status: int, text: str, error: Exception | None = None, field: str | None = None
) -> dict[str, Any]:
    """field: the one of the request that is at fault."""
    name = type(error).__name__
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = _BY_NAME.get(name, _CODES.get(status))
    field = {"UnknownModelName": "model", "ContextLengthExceeded": "messages"}.get(name, field)
    return {"error": {"message": text, "type": kind, "param": field, "code": code}}
