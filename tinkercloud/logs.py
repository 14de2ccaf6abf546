"""Log records: what each is about, and their two forms, text and JSON."""

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_about: ContextVar[Mapping[str, str | int]] = ContextVar("what the running task is about")


def about(**ids: str | int | None) -> None:
    """From now on the records of this task, and of tasks that it starts, name these; no others."""
    _about.set({name: value for name, value in ids.items() if value is not None})


def session_of(subject: str | None) -> str | None:
    """The session of a model or a sampling session, which its id begins with."""
    return None if subject is None else subject.partition(":")[0]


class JsonFormatter(logging.Formatter):
    """One object to a line: time, level, logger, message, process, what it is about, stack."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **_about.get({}),
        }
        if record.exc_info:
            entry["stack"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str, form: LogFormat, process: str = "server") -> None:
    """All records of this process go to standard error."""
    handler = logging.StreamHandler()
    text = TEXT if process == "server" else TEXT.replace("%(name)s", f"{process} %(name)s")
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
