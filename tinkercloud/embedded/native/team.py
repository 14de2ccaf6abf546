"""Threads that compute together in C (team.c)."""

from tinkercloud.embedded.native.compiler import library


class Team:
    """Threads that compute together; ended with the process."""

    def __init__(self, num_threads: int):
        loaded = library()
        assert loaded is not None, "asked for only where there is a library"
        self.library = loaded
        self.handle = loaded.team_new(num_threads)
        if not self.handle:
            raise OSError(f"cannot start {num_threads} threads")

    def end(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self.library.team_end(handle)
