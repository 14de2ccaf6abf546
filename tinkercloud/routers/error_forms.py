"""The form of errors: each API's clients read their own."""

from tinkercloud.errors import InvalidField
from tinkercloud.openai_api import errors as openai_errors

OPENAI_API = "/oai/api/"


def error_answer(
    path: str, status: int, text: str, error: Exception | None = None
) -> tuple[int, object]:
    """(status, body). A fault in a body is 400 to OpenAI's clients, 422 to Tinker's."""
    if OPENAI_API not in path:
        return status, {"detail": text}
    status = 400 if status == 422 else status
    field = error.field if isinstance(error, InvalidField) else None
    return status, openai_errors.error_body(status, text, error, field)
