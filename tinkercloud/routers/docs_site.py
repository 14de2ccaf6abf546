"""These documents as a site, where `make docs` has built it: for anybody who reaches the server."""

import base64
import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from tinkercloud.errors import NotFound
from tinkercloud.routers.deps import DOCS_PATH

SITE = Path(__file__).resolve().parent.parent / "docs_site"
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.S)


@lru_cache(maxsize=256)
def _policy(path: str, modified_at: float) -> str:
    """The content security policy of a page: its own scripts, and nothing from another host.
    modified_at: so that a page that is built anew has a new one."""
    scripts = _INLINE_SCRIPT.findall(Path(path).read_bytes())
    digests = {base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts}
    allowed = " ".join(f"'sha256-{digest}'" for digest in sorted(digests))
    return (
        f"default-src 'self'; script-src 'self' {allowed}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; frame-ancestors 'none'; form-action 'none'"
    )


def has_pages() -> bool:
    return (SITE / "index.html").exists()


class DocsSite(StaticFiles):
    """The files of `SITE`, which may not be there yet."""

    async def check_config(self) -> None:
        """Before the first answer, until it has passed once. Raises NotFound."""
        if not has_pages():
            raise NotFound("the documentation is not built here: `make docs` builds it")

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["X-Content-Type-Options"] = "nosniff"
        if str(full_path).endswith(".html"):
            policy = _policy(str(full_path), stat_result.st_mtime)
            response.headers["Content-Security-Policy"] = policy
        return response


router = APIRouter()
router.mount(DOCS_PATH, DocsSite(directory=SITE, html=True, check_dir=False))
