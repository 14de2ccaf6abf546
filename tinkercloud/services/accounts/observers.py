"""Who sees the numbers of the whole server; everybody else sees their own."""

from collections.abc import Collection

from tinkercloud.storage.keys import KeyStore, Role


class Observers:
    """Administrators, the users of these names, and whoever is the only user that there is."""

    def __init__(self, names: Collection[str], keys: KeyStore, *, auth: bool):
        self._names = names
        self._keys = keys
        self._auth = auth

    def include(self, user: str, role: Role) -> bool:
        if not self._auth or role == "admin" or user in self._names:
            return True
        return self._keys.users() == frozenset((user,))
