"""The doctor: on this machine as it is, in environments that are broken, and on facts made up."""

import json
import sys
import textwrap
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.serving import ROOT
from tinkercloud import cli
from tinkercloud.doctor import report as doctor
from tinkercloud.doctor import requirements
from tinkercloud.doctor.checks import CHECKS, GIB

GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "free_bytes": 79 * GIB,
    "total_bytes": 80 * GIB,
}


def node(address: str, **changes) -> dict:
    versions = {"torch": "2.13.0", "ray": "2.60.0"}
    told = {"python": "3.11.7", "versions": versions, "sees_data_dir": True, "shm_bytes": GIB}
    return {"address": address, "cpus": 96, "gpus": 8, "object_store_bytes": GIB, **told, **changes}


def healthy_facts() -> dict[str, dict]:
    """What a good machine with eight GPUs would answer."""
    return {
        "python": {"version": "3.11.7", "executable": "/usr/bin/python"},
        "versions": {
            name: next(iter(wanted.specifier)).version
            for name, wanted in requirements.requirements("embedded").items()
        },
        "host": {
            "disk_free_bytes": 900 * GIB,
            "writable": True,
            "shm_bytes": 64 * GIB,
            "open_files": 1048576,
            "memlock_bytes": -1,
            "interfaces": ["eth0"],
            "port_error": "",
        },
        "driver": {"version": "580.10", "gpus": ["580.10, NVIDIA H100"] * 8},
        "torch": {
            "version": "2.13.0+cu130",
            "cuda": "13.0",
            "gpus": [GPU] * 8,
            "no_peer_access": [],
            "nccl": "2.30.7",
        },
        "ray": {"version": "2.60.0", "nodes": [node("10.0.0.1"), node("10.0.0.2")]},
        "sglang": {
            "version": "0.5.23",
            "python": "3.11.7",
            "torch": "2.13.0+cu130",
            "torch_memory_saver": "0.0.10",
            "kernels": "0.4.10",
            "speculative": ["EAGLE3", "NGRAM"],
        },
        "megatron-core": {"version": "0.16.1"},
        "transformer-engine": {"version": "2.11.0"},
        "torch-memory-saver": {"version": "0.0.10"},
        "sglang-router": {"version": "0.3.2"},
        "apex": {"version": "0.1"},
        "flash-attn": {"version": "2.8.3"},
    }


@pytest.fixture
def target(tmp_path):
    return doctor.Target("cluster", tmp_path, python=sys.executable)


def finding(target: doctor.Target, facts: dict, name: str):
    lines = {line.name: line for line in doctor.diagnose(target, facts).lines}
    return lines[name]


class TestRequirements:
    def test_are_those_of_the_projects_file(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        written = project["optional-dependencies"]["cluster"]
        expected = {Requirement(text).name for text in written} - {"tinkercloud"}
        assert expected <= set(requirements.requirements("cluster"))

    def test_hold_those_of_included_extras(self):
        assert {"torch", "fastapi", "ray"} <= set(requirements.requirements("cluster"))

    def test_without_a_checkout_are_those_of_the_installed_package(self, monkeypatch):
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

    @pytest.mark.parametrize("found", ["2.60.0", "2.55", "3.0.dev0"])
    def test_a_version_that_fits_has_no_misfit(self, found):
        assert requirements.misfit("ray", found, "cluster") == ""

    def test_an_old_version_is_named_with_what_is_needed(self):
        text = requirements.misfit("ray", "2.9.0", "cluster")
        assert text.startswith("ray 2.9.0, but >=")

    def test_a_local_build_fits_like_its_release(self):
        assert requirements.misfit("torch", "2.13.0+cpu", "embedded") == ""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return doctor.ask(doctor.Target("fake", folder, sglang_python=None))


class TestOnThisMachine:
    """The real probes, in processes, whatever is installed here."""

    def test_every_check_has_the_facts_that_it_reads(self, facts, tmp_path):
        diagnosis = doctor.diagnose(doctor.Target("fake", tmp_path), facts)
        assert [line.name for line in diagnosis.lines] == [check.name for check in CHECKS]

    def test_the_fake_backend_can_run(self, facts, tmp_path):
        assert doctor.diagnose(doctor.Target("fake", tmp_path), facts).can_run

    def test_versions_are_those_of_the_installed_packages(self, facts):
        assert facts["versions"]["fastapi"] == metadata.version("fastapi")

    def test_python_is_this_one(self, facts):
        assert facts["python"]["executable"] == sys.executable

    def test_the_host_is_measured(self, facts):
        assert facts["host"]["disk_free_bytes"] > 0
        assert facts["host"]["open_files"] != 0

    def test_ray_is_not_started_for_other_backends(self, facts):
        assert facts["ray"] == {"skipped": "not tried for the backend fake"}


class TestInABrokenEnvironment:
    def test_a_python_that_does_not_exist_is_named(self, tmp_path):
        target = doctor.Target("embedded", tmp_path, python="/does/not/exist/python")
        facts = doctor.ask(target)
        line = finding(target, facts, "Python")
        assert line.blocks
        assert "/does/not/exist/python" in line.finding.found

    def test_without_any_package_nothing_can_run_and_every_line_is_there(self, tmp_path):
        bare = tmp_path / "python"
        bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
        bare.chmod(0o755)
        target = doctor.Target("embedded", tmp_path, python=str(bare), sglang_python=str(bare))
        diagnosis = doctor.diagnose(target, doctor.ask(target))
        missing = {line.name for line in diagnosis.lines if line.blocks}
        assert missing == {"server packages", "torch", "weights' packages"}
        assert not diagnosis.can_run

    @pytest.fixture
    def program(self, tmp_path):
        def write(body: str) -> str:
            path = tmp_path / "program"
            path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
            path.chmod(0o755)
            return str(path)

        return write

    def test_a_probe_that_hangs_is_given_up(self, program):
        answer = doctor._probe(program("import time; time.sleep(60)"), ("torch",), 1.0)
        assert answer == {"error": "no answer within 1 s"}

    def test_a_probe_that_crashes_says_how(self, program):
        answer = doctor._probe(program("import os; os.abort()"), ("torch",), 20.0)
        assert answer["error"].startswith("ended with status -6")

    def test_a_package_that_cannot_be_imported_is_missing_with_the_reason(self, tmp_path):
        broken = tmp_path / "broken_package.py"
        broken.write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
        run = tmp_path / "python"
        run.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
        run.chmod(0o755)
        answer = doctor._probe(str(run), ("package", "broken_package", "broken"), 20.0)
        assert answer == {"error": "OSError: libcuda.so.1: cannot open shared object file"}

    def test_what_a_probe_prints_before_its_answer_is_ignored(self, program):
        answer = doctor._probe(program("print('[1]'); print('{\"version\": \"1\"}')"), (), 20.0)
        assert answer == {"version": "1"}

    def test_a_script_beside_the_probes_hides_no_package_of_its_name(self):
        answer = doctor._probe(sys.executable, ("package", "packaging", "packaging"), 20.0)
        assert answer == {"version": metadata.version("packaging")}


class TestFindings:
    def test_a_healthy_cluster_has_nothing_to_remedy(self, target):
        diagnosis = doctor.diagnose(target, healthy_facts())
        assert [line for line in diagnosis.lines if line.finding.status != "ok"] == []
        assert diagnosis.can_run

    @pytest.mark.parametrize(
        ("fact", "answer", "line"),
        [
            ("torch", {"error": "ModuleNotFoundError: No module named 'torch'"}, "torch"),
            ("torch", {"version": "2.1.0", "cuda": "12.1", "gpus": [GPU]}, "torch"),
            ("driver", {"error": "nvidia-smi ended with status 9"}, "NVIDIA driver"),
            ("torch", {"version": "2.13.0", "cuda": None, "gpus": []}, "GPUs"),
            ("ray", {"error": "ConnectionError: no"}, "Ray"),
            ("ray", {"version": "2.9.0", "nodes": [node("10.0.0.1")]}, "Ray"),
            ("ray", {"version": "2.60.0", "nodes": [node("a", gpus=0)]}, "Ray's nodes"),
            ("ray", {"version": "2.60.0", "nodes": [node("a", error="x")]}, "Ray's nodes"),
            (
                "ray",
                {"version": "2.60.0", "nodes": [node("a"), node("b", python="3.12.1")]},
                "same versions",
            ),
            (
                "ray",
                {"version": "2.60.0", "nodes": [node("a", sees_data_dir=False)]},
                "shared data",
            ),
            ("megatron-core", {"error": "ModuleNotFoundError"}, "Megatron-core"),
            ("transformer-engine", {"error": "ModuleNotFoundError"}, "Transformer Engine"),
            ("sglang", {"error": "PackageNotFoundError"}, "SGLang"),
            ("sglang-router", {"error": "ModuleNotFoundError"}, "SGLang's router"),
        ],
    )
    def test_what_the_cluster_cannot_do_without_blocks_it(self, target, fact, answer, line):
        blocking = finding(target, healthy_facts() | {fact: answer}, line)
        assert blocking.blocks
        assert blocking.finding.remedy

    @pytest.mark.parametrize(
        ("fact", "answer", "line", "told"),
        [
            ("apex", {"error": "ModuleNotFoundError"}, "Apex", "Not needed"),
            ("torch-memory-saver", {"error": "No"}, "torch_memory_saver", "place them apart"),
            ("megatron-core", {"version": "0.9.0"}, "Megatron-core", "tinkercloud[cluster]"),
        ],
    )
    def test_what_it_can_do_without_is_a_warning(self, target, fact, answer, line, told):
        found = finding(target, healthy_facts() | {fact: answer}, line)
        assert (found.blocks, found.finding.status) == (False, "warning")
        assert told in found.finding.remedy

    @pytest.mark.parametrize(
        ("fact", "value", "line"),
        [
            ("disk_free_bytes", GIB, "disk"),
            ("shm_bytes", 64 * 1024**2, "shared memory"),
            ("open_files", 1024, "open files"),
            ("memlock_bytes", 65536, "locked memory"),
            ("interfaces", ["eth0", "ib0"], "network"),
        ],
    )
    def test_a_small_limit_of_the_machine_is_a_warning(self, target, fact, value, line):
        facts = healthy_facts()
        facts["host"] = {**facts["host"], fact: value}
        found = finding(target, facts, line).finding
        assert found.status == "warning"
        assert found.remedy

    def test_a_port_in_use_blocks(self, target):
        facts = healthy_facts()
        facts["host"] |= {"port_error": "Address already in use"}
        assert finding(target, facts, "port").blocks

    def test_an_interface_that_nccl_is_told_and_that_is_not_up_is_a_warning(self, target):
        named = replace(target, variables={"NCCL_SOCKET_IFNAME": "ib0"})
        assert "ib0" in finding(named, healthy_facts(), "network").finding.found

    def test_gpus_of_rays_nodes_will_do_where_this_machine_has_none(self, target):
        facts = healthy_facts()
        facts["torch"] = {"version": "2.13.0+cpu", "cuda": None, "gpus": []}
        facts["driver"] = {"error": "FileNotFoundError"}
        remote = replace(target, ray_address="10.0.0.1:6379")
        assert finding(remote, facts, "GPUs").finding.found == "none here; 16 on Ray's nodes"
        assert doctor.diagnose(remote, facts).can_run

    def test_prepared_ranks_need_neither_gpus_nor_transformer_engine(self, target):
        facts = healthy_facts() | {"transformer-engine": {"error": "ModuleNotFoundError"}}
        facts["torch"] = {"version": "2.13.0+cpu", "cuda": None, "gpus": []}
        facts["sglang"] |= {"kernels_error": "ModuleNotFoundError"}
        assert doctor.diagnose(replace(target, needs_gpus=False), facts).can_run

    def test_the_embedded_backend_needs_nothing_of_the_cluster(self, target):
        nothing = {"error": "ModuleNotFoundError"}
        cluster_only = ("driver", "sglang", "megatron-core", "transformer-engine", "sglang-router")
        facts = healthy_facts() | dict.fromkeys(cluster_only, nothing) | {"ray": {"skipped": "no"}}
        assert doctor.diagnose(replace(target, backend="embedded"), facts).can_run


class TestCapabilities:
    def test_context_parallelism_needs_transformer_engine(self, target):
        facts = healthy_facts() | {"transformer-engine": {"error": "ModuleNotFoundError"}}
        found = doctor.capabilities(target, facts)["training parallelism"]
        assert not found["context"].available
        assert found["tensor"].available

    def test_one_gpu_allows_no_parallelism(self, target):
        facts = healthy_facts()
        facts["torch"] |= {"gpus": [GPU]}
        found = doctor.capabilities(target, facts)["training parallelism"]
        assert not any(item.available for item in found.values())

    def test_tensors_are_shared_by_one_torch_only(self, target):
        facts = healthy_facts()
        assert doctor.capabilities(target, facts)["weight sync"]["tensor"].available
        facts["sglang"] |= {"torch": "2.14.1"}
        sync = doctor.capabilities(target, facts)["weight sync"]
        assert {name: item.available for name, item in sync.items()} == {
            "tensor": False,
            "broadcast": True,
            "disk": True,
        }

    def test_engines_give_memory_back_where_both_sides_have_the_saver(self, target):
        facts = healthy_facts()
        assert doctor.capabilities(target, facts)["memory offload"]["engines"].available
        facts["sglang"] |= {"torch_memory_saver": None}
        assert not doctor.capabilities(target, facts)["memory offload"]["engines"].available

    def test_speculation_is_what_sglang_names(self, target):
        named = doctor.capabilities(target, healthy_facts())["speculative decoding"]
        assert list(named) == ["EAGLE3", "NGRAM"]

    def test_a_backend_that_cannot_run_names_what_is_missing(self, target):
        facts = healthy_facts() | {"sglang": {"error": "PackageNotFoundError"}}
        found = doctor.capabilities(target, facts)["backends"]
        assert found["embedded"].available
        assert found["cluster"].how == "missing: SGLang, SGLang's kernels"


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ((), sys.executable),
        (("/opt/sglang/bin/python", "-m", "sglang.launch_server"), "/opt/sglang/bin/python"),
        (("env", "A=1", "python3.12", "-m", "x"), "python3.12"),
        (("/usr/local/bin/launch", "--tp", "2"), None),
    ],
)
def test_sglangs_python_is_the_one_that_its_command_names(command, python):
    assert doctor.python_of(command) == python


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def elsewhere(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TINKERCLOUD_DATA_DIR", str(tmp_path / "data"))

    def test_says_yes_with_status_0(self, capsys, monkeypatch, facts):
        monkeypatch.setattr(doctor, "ask", lambda target: facts)
        assert cli.main(["doctor", "--backend", "fake", "--port", "0"]) == 0
        assert capsys.readouterr().out.endswith("The backend fake can run here.\n")

    def test_says_no_with_status_1(self, capsys, monkeypatch):
        facts = healthy_facts() | {"torch": {"error": "ModuleNotFoundError: No torch"}}
        monkeypatch.setattr(doctor, "ask", lambda target: facts)
        assert cli.main(["doctor", "--backend", "embedded"]) == 1
        written = capsys.readouterr().out
        assert "MISSING  torch" in written
        assert written.endswith("The backend embedded cannot run here.\n")

    def test_answers_programs_with_json(self, capsys, monkeypatch):
        monkeypatch.setattr(doctor, "ask", lambda target: healthy_facts())
        assert cli.main(["doctor", "--backend", "fake", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["can_run"] is True
        assert {"name", "purpose", "status", "found", "remedy", "blocks"} == set(
            answer["checks"][0]
        )
        assert set(answer["capabilities"]["weight sync"]) == {"tensor", "broadcast", "disk"}

    def test_a_backend_that_does_not_exist_is_status_2(self, capsys):
        assert cli.main(["doctor", "--backend", "gpu"]) == 2
