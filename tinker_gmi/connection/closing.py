"""A client as a context manager."""

from types import TracebackType
from typing import Protocol, Self


class _Closable(Protocol):
    def close(self) -> None: ...


class ClosesOnExit:
    """`with client:` calls its `close` at the end, however the block ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _Closable,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
