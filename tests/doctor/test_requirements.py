"""What the extras ask for, and whether an installed version does."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.serving import ROOT
from tinkercloud.doctor import requirements


def test_requirements_are_those_of_the_projects_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = project["optional-dependencies"]["cluster"]
    expected = {Requirement(text).name for text in written} - {"tinkercloud"}
    assert expected <= set(requirements.requirements("cluster"))


def test_requirements_hold_those_of_included_extras():
    assert {"torch", "fastapi", "ray"} <= set(requirements.requirements("cluster"))


def test_requirements_without_a_checkout_are_those_of_the_installed_package(monkeypatch):
    def declared(name: str) -> list[str]:
        assert name == "tinkercloud"
        return [
            "httpx>=0.27",
            'ray>=2.55; extra == "cluster"',
            'torch>=2.6; extra == "embedded"',
        ]

    class Fields:
        def get_all(self, name: str) -> list[str]:
            return {"Provides-Extra": ["cluster", "embedded"]}[name]

    monkeypatch.setattr(requirements, "_CHECKOUT", Path("/does/not/exist"))
    monkeypatch.setattr(metadata, "requires", declared)
    monkeypatch.setattr(metadata, "metadata", lambda name: Fields())
    requirements._declared.cache_clear()
    try:
        assert requirements.requirements("cluster") == {"ray": Requirement("ray>=2.55")}
    finally:
        requirements._declared.cache_clear()


@pytest.mark.parametrize("version", ["2.60.0", "2.55", "3.0.dev0"])
def test_a_version_that_fits_has_no_misfit(version):
    assert requirements.misfit("ray", version, "cluster") == ""


def test_an_old_version_is_named_with_what_is_needed():
    text = requirements.misfit("ray", "2.9.0", "cluster")
    assert text.startswith("ray 2.9.0, but >=")


def test_a_local_build_fits_like_its_release():
    assert requirements.misfit("torch", "2.13.0+cpu", "embedded") == ""
