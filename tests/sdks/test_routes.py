"""Every path that a version of the SDK can send has a route, whatever method calls it."""

import re
import sysconfig
from pathlib import Path

import pytest
from starlette.routing import Route

from tests.sdks import matrix
from tinkercloud.routers import ROUTERS

# Sent only to a server whose client/config turns `custom_loss_server_side` on.
UNSENT = {"/api/v1/create_custom_loss"}
PATH = re.compile(r"\"(/api/v1/[^\"\s]*)\"")


def paths_in(package: Path) -> set[str]:
    """The paths in an SDK's sources, its own tests left out."""
    files = (file for file in package.rglob("*.py") if not file.name.endswith("_test.py"))
    return {path for file in files for path in PATH.findall(file.read_text(encoding="utf-8"))}


def unanswered(paths: set[str]) -> list[str]:
    """Those of the paths for which the server has no route."""
    routes = [route for router in ROUTERS for route in router.routes]
    patterns = [route.path_regex for route in routes if isinstance(route, Route)]
    # a checkpoint id in a path has a slash: weights/NAME
    filled = {
        path: re.sub(r"{[^}]*}", "x", path.replace("{checkpoint_id}", "weights/x"))
        for path in paths
    }
    return sorted(
        path
        for path, url in filled.items()
        if not any(pattern.fullmatch(url) for pattern in patterns)
    )


def test_the_installed_sdk_asks_for_nothing_that_has_no_route() -> None:
    paths = paths_in(Path(sysconfig.get_path("purelib"), "tinker"))
    assert len(paths) > 30
    assert set(unanswered(paths)) <= UNSENT


@pytest.mark.slow
@pytest.mark.parametrize("version", matrix.versions())
def test_an_sdk_asks_for_nothing_that_has_no_route(version: str) -> None:
    environment = matrix.interpreter(version).parent.parent
    [package] = environment.glob("lib/python*/site-packages/tinker")
    paths = paths_in(package)
    assert len(paths) > 20
    assert set(unanswered(paths)) <= UNSENT
