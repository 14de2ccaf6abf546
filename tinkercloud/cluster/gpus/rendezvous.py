"""Where the processes of one group find each other."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_BACKLOG = 4096  # ranks that connect before the store is open wait in the socket's queue


class Rendezvous:
    """A port of this node, bound from the moment it is chosen: another process would take it now
    and then between the choice of a port and the first `listen` on it."""

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
        """The store of the group, served for as long as this object lives.

        A rank 0 of this process that uses `init_method` shares it. world_size: return once so many
        processes have joined, this one included; raises torch's DistStoreError at the timeout.
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
        """Free the port, unless it was opened: the store owns it then."""
        self._socket.close()
