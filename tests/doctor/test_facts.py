"""The real probes, in processes: on this machine as it is, and in environments that are broken."""

import sys
import textwrap
from dataclasses import replace
from importlib import metadata

import pytest

from tinkercloud.backends import BACKENDS
from tinkercloud.config import ModelSource
from tinkercloud.doctor import facts as probes
from tinkercloud.doctor.checks import CHECKS
from tinkercloud.doctor.diagnosis import ALL_FACTS, diagnose
from tinkercloud.doctor.target import Target, python_of

LIMIT_S = 240.0  # of one probe: it imports torch, perhaps for the first time on this machine


@pytest.fixture(scope="module")
def target(tmp_path_factory, smollm2_gguf):
    served = (ModelSource("a/b", smollm2_gguf), ModelSource("c", smollm2_gguf.parent / "no"))
    data_dir = tmp_path_factory.mktemp("data")
    return Target("embedded", data_dir, models=served, sglang_python=None)


@pytest.fixture(scope="module")
def facts(target):
    return probes.gather(target, ALL_FACTS)


class TestOnThisMachine:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_every_check_has_the_facts_that_it_reads(self, target, facts, backend):
        diagnosis = diagnose(replace(target, backend=backend), facts)
        assert [line.name for line in diagnosis.lines] == [check.name for check in CHECKS]

    def test_the_fake_backend_can_run(self, target, facts):
        assert diagnose(replace(target, backend="fake"), facts).can_run

    def test_only_named_facts_are_gathered(self, target):
        assert set(probes.gather(target, ["python"])) == {"python", "ray", "sglang"}

    def test_versions_are_those_of_the_installed_packages(self, facts):
        assert facts["versions"]["fastapi"] == metadata.version("fastapi")

    def test_python_is_this_one(self, facts):
        assert facts["python"]["executable"] == sys.executable

    def test_the_host_is_measured(self, facts):
        host = facts["host"]
        assert host["disk_free_bytes"] > 0
        assert host["open_files"] != 0
        assert 0 < host["memory"]["free_bytes"] <= host["memory"]["total_bytes"]

    def test_the_engine_is_what_the_engine_process_would_choose(self, facts):
        from tinkercloud.embedded.model.device import choose_device, choose_dtype, usable_cores

        dtype = choose_dtype("auto", choose_device())
        assert facts["engine"]["dtype"] == str(dtype).removeprefix("torch.")
        assert facts["engine"]["cores"] == usable_cores()

    def test_trained_logprobs_are_the_sampled_ones_where_that_is_promised(self, facts):
        answer = facts["deviation"]
        assert answer["tokens"] > 100
        if answer["promised"]:
            assert answer["largest"] == 0.0

    def test_models_are_read_each_on_its_own(self, facts):
        assert facts["models"]["a/b"] == {"architecture": "llama", "parameters": 134515008}
        assert facts["models"]["c"]["error"].startswith("no model at ")

    def test_ray_is_not_started_for_other_backends(self, facts):
        assert facts["ray"] == {"skipped": "not tried for the backend embedded"}


class TestInABrokenEnvironment:
    def test_a_python_that_does_not_exist_is_named(self, tmp_path):
        target = Target("embedded", tmp_path, python="/does/not/exist/python")
        answer = probes.gather(target, ["python"])["python"]
        assert answer["error"].startswith("cannot run /does/not/exist/python")

    def test_without_any_package_nothing_can_run_and_every_line_is_there(self, tmp_path):
        bare = tmp_path / "python"
        bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
        bare.chmod(0o755)
        target = Target("embedded", tmp_path, python=str(bare), sglang_python=str(bare))
        diagnosis = diagnose(target, probes.gather(target, ALL_FACTS))
        assert len(diagnosis.lines) == len(CHECKS)
        missing = {line.name for line in diagnosis.lines if line.blocks}
        assert missing == {"server packages", "torch", "weights' packages"}

    @pytest.fixture
    def program(self, tmp_path):
        def write(body: str) -> str:
            path = tmp_path / "program"
            path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
            path.chmod(0o755)
            return str(path)

        return write

    def test_a_probe_that_hangs_is_given_up(self, program):
        answer = probes.run(program("import time; time.sleep(60)"), ("torch",), 1.0)
        assert answer == {"error": "no answer within 1 s"}

    def test_a_probe_that_crashes_says_how(self, program):
        answer = probes.run(program("import os; os.abort()"), ("torch",), LIMIT_S)
        assert answer["error"].startswith("ended with status -6")

    def test_a_package_that_cannot_be_imported_is_missing_with_the_reason(self, tmp_path):
        broken = tmp_path / "broken_package.py"
        broken.write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
        run = tmp_path / "python"
        run.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
        run.chmod(0o755)
        answer = probes.run(str(run), ("package", "broken_package", "broken"), LIMIT_S)
        assert answer == {"error": "OSError: libcuda.so.1: cannot open shared object file"}

    def test_without_a_c_compiler_the_engine_says_why_kernels_are_not_used(
        self, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("CC", "/does/not/exist/cc")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        answer = probes.run(sys.executable, ("engine", "float32"), LIMIT_S)
        if answer["device"] == "cpu":
            assert answer["kernels"] == ""
            assert "/does/not/exist/cc" in answer["kernels_error"]

    @pytest.mark.slow
    def test_without_a_c_compiler_the_deviation_is_measured_and_equality_is_not_promised(
        self, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("CC", "/does/not/exist/cc")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        answer = probes.run(sys.executable, ("deviation", "float32"), LIMIT_S)
        assert answer["promised"] is False
        assert 0 <= answer["largest"] < 1e-3

    def test_the_engine_says_of_each_number_type_whether_products_are_row_invariant(self):
        answer = probes.run(sys.executable, ("engine", "bfloat16"), LIMIT_S)
        if answer["device"] == "cpu":
            assert answer["row_invariant"].keys() == {"bfloat16", "float32"}

    def test_what_a_probe_prints_before_its_answer_is_ignored(self, program):
        answer = probes.run(program("print('[1]'); print('{\"version\": \"1\"}')"), (), LIMIT_S)
        assert answer == {"version": "1"}

    def test_a_script_beside_the_probes_hides_no_package_of_its_name(self):
        answer = probes.run(sys.executable, ("package", "packaging", "packaging"), LIMIT_S)
        assert answer == {"version": metadata.version("packaging")}


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
    assert python_of(command) == python
