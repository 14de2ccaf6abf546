"""What the project's extras ask for: read from `pyproject.toml`, nowhere repeated."""

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

PROJECT = "tinkercloud"
_CHECKOUT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def requirements(extra: str) -> dict[str, Requirement]:
    """By normal name, those of the extras that it includes too; empty for an unknown extra."""
    by_name: dict[str, Requirement] = {}
    for text in _declared().get(extra, ()):
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == PROJECT:
            for included in requirement.extras:
                by_name |= requirements(included)
        else:
            by_name[canonicalize_name(requirement.name)] = requirement
    return by_name


def misfit(name: str, version: str | None, extra: str) -> str:
    """Why the installed version does not do; empty when it does or the extra asks for none.

    version None: not installed.
    """
    requirement = requirements(extra).get(canonicalize_name(name))
    if version is None:
        return f"{name} is not installed"
    if requirement is None:
        return ""
    try:
        fits = requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return ""  # a local build, whose name says nothing of its age
    return "" if fits else f"{name} {version}, but {requirement.specifier} is needed"


def remedy(extra: str) -> str:
    """How to install an extra."""
    return f"pip install '{PROJECT}[{extra}]'" if extra else ""


@cache
def _declared() -> dict[str, tuple[str, ...]]:
    """Extra -> requirements. A checkout's file is newer than what was installed from it."""
    if _CHECKOUT.is_file():
        project = tomllib.loads(_CHECKOUT.read_text(encoding="utf-8"))["project"]
        return {name: tuple(rows) for name, rows in project["optional-dependencies"].items()}
    declared: dict[str, tuple[str, ...]] = {}
    for text in metadata.requires(PROJECT) or ():
        requirement = Requirement(text)
        for extra in metadata.metadata(PROJECT).get_all("Provides-Extra") or ():
            if requirement.marker and requirement.marker.evaluate({"extra": extra}):
                plain, _, _ = text.partition(";")
                declared[extra] = (*declared.get(extra, ()), plain.strip())
    return declared
