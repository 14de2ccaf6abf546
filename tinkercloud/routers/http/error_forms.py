"""The form of errors: each API's clients read their own."""

from fastapi.exceptions import RequestValidationError

from tinkercloud.anthropic_api import errors as anthropic_errors
from tinkercloud.errors import InvalidField, QuotaExceeded, TooManyRequests
from tinkercloud.openai_api import errors as openai_errors

OPENAI_API, ANTHROPIC_API = "/oai/api/", "/anthropic/"  # also within capture sessions


def error_answer(
    path: str, status: int, text: str, error: Exception | None = None
) -> tuple[int, object]:
    """(status, body). A fault in a body is 400 to OpenAI's and Anthropic's clients, 422 to
    Tinker's."""
    if OPENAI_API not in path and ANTHROPIC_API not in path:
        return status, {"detail": text}
    status = 400 if status == 422 else status
    if ANTHROPIC_API in path:
        return status, anthropic_errors.error_body(status, text)
    return status, openai_errors.error_body(status, text, error, _field(error))


def _field(error: Exception | None) -> str | None:
    """The one of the body that is at fault, where it is one."""
    if isinstance(error, InvalidField):
        return error.field
    if isinstance(error, RequestValidationError):
        where = error.errors()[0]["loc"]
        return ".".join(str(part) for part in where[1:] if where[0] == "body") or None
    return None


def retry_headers(error: Exception) -> dict[str, str]:
    """What tells a client when to send a refused request again, or not to."""
    if isinstance(error, TooManyRequests):
        return {"retry-after": str(error.retry_after_s)}
    return {"x-should-retry": "false"} if isinstance(error, QuotaExceeded) else {}
