"""`tinkercloud doctor`: what it prints, and its exit status."""

import json
import sys

import pytest

from tests.doctor.machines import healthy_facts, laptop_facts
from tinkercloud import cli
from tinkercloud.doctor import facts as probes
from tinkercloud.doctor.checks import CHECKS


@pytest.fixture(autouse=True)
def an_empty_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("TINKERCLOUD_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def gathered(monkeypatch):
    """Answers with these facts; the names that were asked for."""
    names: list[str] = []

    def answer(facts: dict) -> list[str]:
        def gather(target, wanted):
            names.extend(wanted)
            return {name: facts[name] for name in wanted}

        monkeypatch.setattr(probes, "gather", gather)
        return names

    return answer


def test_a_backend_that_can_run_is_status_0(capsys, gathered):
    gathered(laptop_facts())
    assert cli.main(["doctor", "--port", "0"]) == 0
    written = capsys.readouterr().out
    assert "The backend embedded can run here." in written
    assert len(written.splitlines()) <= 10


def test_only_what_the_backend_needs_is_probed(gathered):
    names = gathered(laptop_facts())
    cli.main(["doctor", "--port", "0"])
    assert not {"ray", "sglang", "megatron-core"} & set(names)


def test_a_backend_that_cannot_run_is_status_1(capsys, gathered):
    gathered(healthy_facts() | {"torch": {"error": "ModuleNotFoundError: No torch"}})
    assert cli.main(["doctor", "--backend", "embedded"]) == 1
    written = capsys.readouterr().out
    assert "MISSING  software   no torch" in written
    assert "The backend embedded cannot run here." in written


def test_all_shows_every_check_and_what_can_run_here(capsys, gathered):
    gathered(healthy_facts() | {"torch": {"error": "ModuleNotFoundError: No torch"}})
    assert cli.main(["doctor", "--backend", "embedded", "--all"]) == 1
    written = capsys.readouterr().out
    assert "MISSING  torch" in written
    assert [check.name for check in CHECKS if f" {check.name} " not in written] == []
    assert "\nweight sync\n" in written
    assert written.endswith("The backend embedded cannot run here.\n")


def test_programs_are_answered_with_json(capsys, gathered):
    gathered(healthy_facts())
    assert cli.main(["doctor", "--backend", "fake", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["can_run"] is True
    assert [row["name"] for row in answer["checks"]] == [check.name for check in CHECKS]
    keys = {"name", "purpose", "status", "found", "remedy", "blocks"}
    assert set(answer["checks"][0]) == keys
    assert set(answer["capabilities"]["weight sync"]) == {"tensor", "broadcast", "disk"}


def test_a_backend_that_does_not_exist_is_status_2(capsys):
    assert cli.main(["doctor", "--backend", "gpu"]) == 2
    assert "no backend 'gpu'" in capsys.readouterr().err


def test_without_the_packages_of_a_server_it_names_their_extra(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tinkercloud.doctor")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)  # as if not installed
    assert cli.main(["doctor"]) == 2
    assert "pip install 'tinkercloud[server]'" in capsys.readouterr().err
