"""Where the processes of one group find each other."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_BACKLOG = 4096  # ranks that come before the store is open wait here


class Meeting:
    """A port of this node, held from the moment it is chosen: between telling others of a port and
    listening on it somebody else would take it now and then."""

    def __init__(self, address: str):
        self.address = address
        self._socket = socket.create_server((address, 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._store: TCPStore | None = None

    @property
    def init_method(self) -> str:
        """torch.distributed's, for every rank."""
        return f"tcp://{self.address}:{self.port}"

    def open(self, world_size: int | None = None, timeout: timedelta | None = None) -> "TCPStore":
        """Answer those who come, as long as this object lives.

        A rank 0 of this process that goes by `init_method` shares the store. world_size: return
        only when so many are here, this process among them; raises torch's DistStoreError when
        they do not come in time.
        """
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self._store = TCPStore(
            self.address,
            self.port,
            world_size,
            is_master=True,
            timeout=timeout or timedelta(seconds=300),
            wait_for_workers=world_size is not None,
            multi_tenant=True,
            master_listen_fd=self._socket.detach(),
        )
        return self._store

    def close(self) -> None:
        """Where it was never opened, the port is free again."""
        self._socket.close()
