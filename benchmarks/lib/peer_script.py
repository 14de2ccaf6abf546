"""What a script of benchmarks/peers/ does to speak with the benchmark that started it
(`peers.Script`): a job in a file, replies as lines of JSON on its standard output.

Only the standard library is needed here: it runs in the peers' environments.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_job() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


class Replies:
    """Made before anything else can print: whatever a library prints goes to standard error."""

    def __init__(self) -> None:
        self._stream, sys.stdout = sys.stdout, sys.stderr

    def send(self, **fields: Any) -> None:
        self._stream.write(json.dumps(fields) + "\n")
        self._stream.flush()

    def serve(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """A reply to each line of JSON on the standard input, until that ends."""
        for line in sys.stdin:
            self.send(**answer(json.loads(line)))
