"""The data folder that every run begins with: a new database, and a key for each user."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.simulation.schedule import USERS
from tinkercloud.storage.keys import KeyStore

MEMORY = Path("/dev/shm")


def scratch() -> Path:
    """A folder of this process, in memory where the machine has that."""
    place = MEMORY if MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="tinkercloud-simulation-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def prepared() -> tuple[Path, dict[str, str]]:
    """The folder, and the users' keys."""
    folder = scratch() / "image"
    store = KeyStore(folder)
    keys = {user: store.add(user) for user in USERS}
    store.close()
    return folder, keys
