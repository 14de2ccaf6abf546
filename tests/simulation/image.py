"""The data folder that every run begins with: a new database, and a key for each user."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.simulation.schedule import USERS
from tinkercloud.storage.keys import UNLIMITED, KeyStore, Quota

MEMORY = Path("/dev/shm")


def scratch() -> Path:
    """A folder of this process, in memory where the machine has that."""
    place = MEMORY if MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="tinkercloud-simulation-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def prepared(checkpoint_bytes: int) -> tuple[Path, dict[str, str]]:
    """The folder, and the users' keys. checkpoint_bytes: the second user's quota, whose others are
    counted and never met; the first one has none."""
    counted = Quota(models=10**6, memory_bytes=10**18, checkpoint_bytes=checkpoint_bytes)
    folder = scratch() / "image"
    store = KeyStore(folder)
    keys = {
        user: store.add(user, quota=quota)
        for user, quota in zip(USERS, (UNLIMITED, counted), strict=True)
    }
    store.close()
    return folder, keys
