"""The short report: ten lines of what matters to the backend in use."""

import pytest

from tests.doctor.machines import healthy_facts, laptop_facts, without_torch
from tinkercloud.config import ModelSource
from tinkercloud.doctor.diagnosis import brief_checks, diagnose, facts_of
from tinkercloud.doctor.finding import GIB
from tinkercloud.doctor.report import MAX_LINES, brief
from tinkercloud.doctor.target import Target


@pytest.fixture
def report(tmp_path):
    def write(backend: str, facts: dict, width: int = 100) -> list[str]:
        served = tuple(ModelSource(name, tmp_path) for name in facts["models"])
        target = Target(backend, tmp_path, models=served, cache_bytes=5 * GIB)
        checks = brief_checks(backend)
        known = {name: facts[name] for name in facts_of(checks)}
        return brief(diagnose(target, known, checks), width).splitlines()

    return write


def test_a_healthy_laptop_is_nine_lines(report, tmp_path):
    lines = report("embedded", laptop_facts(), width=200)
    assert lines == [
        "ok       software   Python 3.11.7, torch 2.13.0+cpu",
        "ok       device     CPU, 8 cores",
        "ok       numbers    float32 (--dtype auto), AVX2, AVX-512",
        "ok       kernels    C kernels for the instruction set avx512, "
        "trained = sampled to the bit",
        "ok       memory     8.0 GiB of memory free; weights and caches take up to 5.5",
        "ok       models     HuggingFaceTB/SmolLM2-135M-Instruct (llama, 135M parameters)",
        f"ok       data       900 GiB free in {tmp_path}",
        "ok       address    127.0.0.1 port 0 is free",
        "The backend embedded can run here. (All checks: --all)",
    ]


def test_a_healthy_cluster_is_ten_lines(report, tmp_path):
    lines = report("cluster", healthy_facts(), width=200)
    assert lines == [
        "ok       software   Python 3.11.7, torch 2.13.0+cu130",
        "ok       GPUs       8 x NVIDIA H100 80GB HBM3, 80 GiB, driver 580.10, NCCL 2.30.7",
        "ok       Ray        Ray 2.60.0, a local one, nodes: 2, with 16 GPUs",
        "ok       training   megatron-core 0.16.1, transformer-engine 2.11.0",
        "ok       sampling   SGLang 0.5.23, torch 2.13.0+cu130, kernels 0.4.10, "
        "sglang-router 0.3.2, torch_memory_saver 0.0.10",
        "ok       network    eth0, 64.0 GiB of shared memory",
        "ok       models     Qwen/Qwen3-8B (qwen3, 8.2B parameters)",
        f"ok       data       900 GiB free in {tmp_path}, seen by 2 nodes",
        "ok       address    127.0.0.1 port 0 is free",
        "The backend cluster can run here. (All checks: --all)",
    ]


def test_without_torch_one_line_says_what_to_install(report):
    missing = [
        line
        for line in report("embedded", without_torch(laptop_facts()), 200)
        if "ok" not in line[:8]
    ]
    assert missing == [
        "MISSING  software   no torch, gguf, safetensors -> pip install 'tinkercloud[embedded]'",
        "The backend embedded cannot run here. (All checks: --all)",
    ]


def test_problems_come_first_with_what_to_do(report):
    facts = laptop_facts()
    facts["engine"] |= {"kernels": "", "kernels_error": "there is no C compiler", "compiler": ""}
    assert report("embedded", facts, 200)[0] == (
        "warning  kernels    there is no C compiler -> install gcc or clang, or set CC; "
        "PyTorch computes, at a part of the speed until then"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("backend", ["embedded", "cluster"])
def test_a_machine_that_lacks_everything_still_gets_ten_lines(report, backend, width):
    facts = without_torch(laptop_facts()) | {"models": {"a/b": {"error": "no model at /nowhere"}}}
    facts["versions"] = dict.fromkeys(facts["versions"])
    facts["host"] |= {"port_error": "Address already in use", "disk_free_bytes": GIB}
    facts["host"] |= {"interfaces": ["eth0", "ib0"], "shm_bytes": 64 * 1024**2}
    facts |= {name: {"error": "ModuleNotFoundError: none"} for name in ("ray", "sglang-router")}
    lines = report(backend, facts, width)
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("MISSING")
    assert lines[-1].startswith(f"The backend {backend} cannot run here.")


def test_problems_that_do_not_fit_are_counted(report):
    facts = without_torch(laptop_facts()) | {"ray": {"error": "ConnectionError: no"}}
    assert any(
        "more problems: tinkercloud doctor --all" in row for row in report("cluster", facts, 60)
    )
