"""Pages about sessions, training runs and checkpoints on the server itself.

The official SDK's `get_console_url()` builds links to its vendor's host, whatever server it talks
to (SDK 0.38, its module of console URLs). The paths are the same here.
"""

from urllib.parse import quote, urlsplit

from tinker_gmi.connection import settings

_SCHEME = "tinker://"


def console_url(link: str, base_url: str | None = None) -> str:
    """The page on our server for a console link of the official SDK, or for a tinker:// path.

    base_url: by default TINKER_BASE_URL. Raises ValueError for any other text.
    """
    root = settings.base_url(base_url).rstrip("/")
    if link.startswith(_SCHEME):
        return f"{root}/checkpoints/{quote(link.removeprefix(_SCHEME))}"
    parts = urlsplit(link)
    if parts.scheme not in ("http", "https") or not parts.path.startswith("/"):
        raise ValueError(f"{link!r} is neither a console link nor a tinker:// path")
    return f"{root}{parts.path}" + (f"?{parts.query}" if parts.query else "")
