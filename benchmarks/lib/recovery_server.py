"""`tinkercloud` with less of its recovery, for a benchmark to compare with: run as a module, with
the arguments of `tinkercloud` and MODE in the environment.

"off": operations are not journalled, models not copied, and a commit is not flushed to the disk.
"journal": operations are journalled, but no snapshot is taken, so that a journal has any length.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tinkercloud import app, cli
from tinkercloud.backends import BACKENDS
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.services.recovery import snapshots
from tinkercloud.storage.connections import AsyncConnection, SqliteConnector

MODE = "RECOVERY_BENCHMARK"
MODULE = "benchmarks.lib.recovery_server"


class WithoutRecovery(EmbeddedBackend):
    def incarnation(self) -> None:
        return None


class WithoutFlush(SqliteConnector):
    """Its commits survive the end of the process, not that of the machine."""

    async def connect_async(self, path: Path) -> AsyncConnection:
        connection: Any = await super().connect_async(path)
        execute = connection.execute

        def relaxed(sql: str, *parameters: Any) -> Any:
            return execute(sql.replace("synchronous = FULL", "synchronous = NORMAL"), *parameters)

        connection.execute = relaxed
        return connection


def main() -> int:
    match os.environ[MODE]:
        case "off":
            BACKENDS["embedded"] = f"{MODULE}:{WithoutRecovery.__name__}"
            app.create_app = partial(app.create_app, connector=WithoutFlush())
        case "journal":
            snapshots.SHARE = 0.0
        case mode:
            raise ValueError(mode)
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
