"""What the client raises, by the official names.

TinkerError
+-- APIError                        the exchange with the server failed
|   +-- APIConnectionError          no answer
|   |   +-- APITimeoutError         no answer in time
|   +-- APIResponseValidationError  an answer that does not follow the API
|   +-- APIStatusError              an HTTP error status (status_code, body)
|       +-- BadRequestError             400
|       +-- AuthenticationError         401
|       +-- BillingError                402
|       +-- PermissionDeniedError       403
|       +-- NotFoundError               404
|       +-- ConflictError               409
|       +-- UnprocessableEntityError    422
|       +-- RateLimitError              429
|       +-- InternalServerError         500 and above
+-- RequestFailedError              accepted, and failed while it ran (category, request_id)
"""

from typing import Any, cast

from tinker_gmi.bodies.responses import RequestErrorCategory


class TinkerError(Exception):
    """Base of the client's errors; `message` is the text."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class APIError(TinkerError):
    """The exchange with the server failed."""


class APIConnectionError(APIError):
    """No answer, after all retries."""


class APITimeoutError(APIConnectionError):
    """No answer in time, after all retries."""


class APIResponseValidationError(APIError):
    """An answer that does not follow the API."""


class APIStatusError(APIError):
    """An HTTP error status; `body` is the decoded JSON, or the text where it is not JSON."""

    def __init__(self, message: str, status_code: int, body: Any = None):
        super().__init__(message)
        self.status_code = status_code
        self.body = body

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.status_code, self.body)


class BadRequestError(APIStatusError):
    pass


class AuthenticationError(APIStatusError):
    pass


class BillingError(APIStatusError):
    pass


class PermissionDeniedError(APIStatusError):
    pass


class NotFoundError(APIStatusError):
    pass


class ConflictError(APIStatusError):
    pass


class UnprocessableEntityError(APIStatusError):
    pass


class RateLimitError(APIStatusError):
    pass


class InternalServerError(APIStatusError):
    pass


class RequestFailedError(TinkerError):
    """The server accepted the request and failed to execute it; category: whose fault."""

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory):
        super().__init__(message)
        self.request_id = request_id
        self.category = category

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.request_id, self.category)


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error(status_code: int, body: Any) -> APIStatusError:
    """The error class for the status; its message carries the server's `detail`."""
    default = InternalServerError if status_code >= 500 else APIStatusError
    detail = cast("dict[str, Any]", body).get("detail", body) if isinstance(body, dict) else body
    return _BY_STATUS.get(status_code, default)(f"HTTP {status_code}: {detail}", status_code, body)
