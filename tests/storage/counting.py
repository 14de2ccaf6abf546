"""How often a database is read and written."""

from tinkercloud.storage.database import Database


def calls_of(database: Database, method: str) -> list[object]:
    """The arguments of every call of `method` from now on; it still does what it does."""
    calls: list[object] = []
    plain = getattr(database, method)

    async def counted(*args: object) -> object:
        calls.append(args)
        return await plain(*args)

    setattr(database, method, counted)
    return calls


def reads_of(database: Database) -> list[object]:
    return calls_of(database, "all")


def commits_of(database: Database) -> list[object]:
    return calls_of(database, "_execute")
