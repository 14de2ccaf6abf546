"""What checks make of facts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doctor.machines import GPU, healthy_facts, laptop_facts, node, ray, without_torch
from tinkercloud.config import Config, ModelSource
from tinkercloud.doctor.checks import CHECKS, ROWS
from tinkercloud.doctor.diagnosis import Line, diagnose
from tinkercloud.doctor.finding import GIB
from tinkercloud.doctor.target import Target, target_of


def line(target: Target, facts: dict, name: str) -> Line:
    return next(line for line in diagnose(target, facts).lines if line.name == name)


@pytest.mark.parametrize("backend", ROWS)
def test_the_short_report_of_a_backend_has_all_that_it_needs(backend):
    shown = {name for row in ROWS[backend] for name in row.checks}
    assert {check.name for check in CHECKS if backend in check.needed_by} <= shown


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("backend", ROWS)
def test_a_check_reads_no_facts_but_those_it_names(check, backend, tmp_path):
    facts = {name: fact for name, fact in healthy_facts().items() if name in check.reads}
    check.look(Target(backend, tmp_path), facts)


class TestOfTheCluster:
    @pytest.fixture
    def target(self, tmp_path):
        served = (ModelSource("Qwen/Qwen3-8B", tmp_path),)
        return Target("cluster", tmp_path, python=sys.executable, models=served)

    def test_a_healthy_cluster_has_nothing_to_remedy(self, target):
        diagnosis = diagnose(target, healthy_facts())
        assert [line for line in diagnosis.lines if line.finding.status != "ok"] == []
        assert diagnosis.can_run

    @pytest.mark.parametrize(
        ("fact", "answer", "name"),
        [
            ("torch", {"error": "ModuleNotFoundError: No module named 'torch'"}, "torch"),
            ("torch", {"version": "2.1.0", "cuda": "12.1", "gpus": [GPU]}, "torch"),
            ("driver", {"error": "nvidia-smi ended with status 9"}, "NVIDIA driver"),
            ("torch", {"version": "2.13.0", "cuda": None, "gpus": []}, "GPUs"),
            ("ray", {"error": "ConnectionError: no"}, "Ray"),
            ("ray", ray(node("10.0.0.1"), version="2.9.0"), "Ray"),
            ("ray", ray(node("a", gpus=0)), "Ray's nodes"),
            ("ray", ray(node("a", error="x")), "Ray's nodes"),
            (
                "ray",
                ray(node("a"), node("b", python="3.12.1")),
                "same versions",
            ),
            (
                "ray",
                ray(node("a", sees_data_dir=False)),
                "shared data",
            ),
            ("megatron-core", {"error": "ModuleNotFoundError"}, "Megatron-core"),
            ("transformer-engine", {"error": "ModuleNotFoundError"}, "Transformer Engine"),
            ("sglang", {"error": "PackageNotFoundError"}, "SGLang"),
            ("sglang-router", {"error": "ModuleNotFoundError"}, "SGLang's router"),
            ("models", {"a/b": {"error": "no model at /nowhere"}}, "models"),
        ],
    )
    def test_what_the_cluster_cannot_do_without_blocks_it(self, target, fact, answer, name):
        blocking = line(target, healthy_facts() | {fact: answer}, name)
        assert blocking.blocks
        assert blocking.finding.remedy

    @pytest.mark.parametrize(
        ("fact", "answer", "name", "remedy"),
        [
            ("apex", {"error": "ModuleNotFoundError"}, "Apex", "Not needed"),
            ("torch-memory-saver", {"error": "No"}, "torch_memory_saver", "place them apart"),
            ("megatron-core", {"version": "0.9.0"}, "Megatron-core", "tinkercloud[cluster]"),
            ("models", {}, "models", "--model NAME=PATH"),
        ],
    )
    def test_what_it_can_do_without_is_a_warning(self, target, fact, answer, name, remedy):
        optional = line(target, healthy_facts() | {fact: answer}, name)
        assert (optional.blocks, optional.finding.status) == (False, "warning")
        assert remedy in optional.finding.remedy

    @pytest.mark.parametrize(
        ("fact", "value", "name"),
        [
            ("disk_free_bytes", GIB, "disk"),
            ("shm_bytes", 64 * 1024**2, "shared memory"),
            ("open_files", 1024, "open files"),
            ("memlock_bytes", 65536, "locked memory"),
            ("interfaces", ["eth0", "ib0"], "network"),
        ],
    )
    def test_a_small_limit_of_the_machine_is_a_warning(self, target, fact, value, name):
        facts = healthy_facts()
        facts["host"] = {**facts["host"], fact: value}
        finding = line(target, facts, name).finding
        assert finding.status == "warning"
        assert finding.remedy

    def test_a_port_in_use_blocks(self, target):
        facts = healthy_facts()
        facts["host"] |= {"port_error": "Address already in use"}
        assert line(target, facts, "port").blocks

    def test_an_interface_that_nccl_is_told_and_that_is_not_up_is_a_warning(self, target):
        named = replace(target, variables={"NCCL_SOCKET_IFNAME": "ib0"})
        assert "ib0" in line(named, healthy_facts(), "network").finding.fact

    def test_gpus_of_rays_nodes_will_do_where_this_machine_has_none(self, target):
        facts = healthy_facts()
        facts["torch"] = {"version": "2.13.0+cpu", "cuda": None, "gpus": []}
        facts["driver"] = {"error": "FileNotFoundError"}
        remote = replace(target, ray_address="10.0.0.1:6379")
        assert line(remote, facts, "GPUs").finding.fact == "none here; 16 on Ray's nodes"
        assert diagnose(remote, facts).can_run

    def test_prepared_ranks_need_neither_gpus_nor_transformer_engine(self, target):
        facts = healthy_facts() | {"transformer-engine": {"error": "ModuleNotFoundError"}}
        facts["torch"] = {"version": "2.13.0+cpu", "cuda": None, "gpus": []}
        facts["sglang"] |= {"kernels_error": "ModuleNotFoundError"}
        assert diagnose(replace(target, needs_gpus=False), facts).can_run


class TestOfTheEmbeddedBackend:
    @pytest.fixture
    def target(self, tmp_path):
        served = (ModelSource("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path),)
        return Target("embedded", tmp_path, models=served, cache_bytes=5 * GIB)

    def test_it_needs_nothing_of_the_cluster(self, target):
        assert diagnose(target, laptop_facts()).can_run

    def test_without_torch_the_packages_block_and_what_needs_torch_is_left_open(self, target):
        lines = diagnose(target, without_torch(laptop_facts())).lines
        assert [line.name for line in lines if line.blocks] == ["torch", "weights' packages"]

    def test_an_engine_that_fails_though_torch_is_there_blocks(self, target):
        facts = laptop_facts() | {"engine": {"error": "ended with status -4"}}
        assert line(target, facts, "device").blocks

    @pytest.mark.parametrize(("fact", "name"), [("engine", "device"), ("deviation", "exactness")])
    def test_a_probe_that_is_late_may_be_so_on_a_busy_machine(self, target, fact, name):
        facts = laptop_facts() | {fact: {"error": "no answer within 120 s"}}
        assert line(target, facts, name).finding.remedy.startswith("a busy machine may only be")

    @pytest.mark.parametrize(
        ("changes", "name", "remedy"),
        [
            ({"kernels": "", "kernels_error": "no", "compiler": ""}, "kernels", "install gcc"),
            ({"kernels": "", "kernels_error": "no"}, "kernels", "PyTorch computes"),
        ],
    )
    def test_an_engine_without_kernels_is_slower_and_no_more(self, target, changes, name, remedy):
        facts = laptop_facts()
        facts["engine"] |= changes
        slower = line(target, facts, name)
        assert (slower.blocks, slower.finding.status) == (False, "warning")
        assert remedy in slower.finding.remedy

    @pytest.mark.parametrize(
        ("answer", "status", "words"),
        [
            (
                {"promised": True, "largest": 0.0},
                "ok",
                "240 tokens of a tiny model are equal to the bit",
            ),
            ({"promised": True, "largest": 1e-6}, "warning", "but up to 1.0e-06 nats apart"),
            ({"promised": False, "largest": 0.031}, "ok", "up to 3.1e-02 nats apart"),
            ({"error": "ended with status -11"}, "warning", "ended with status -11"),
        ],
    )
    def test_unequal_logprobs_are_a_warning_where_equality_is_promised(
        self, target, answer, status, words
    ):
        facts = laptop_facts()
        facts["deviation"] = answer if "error" in answer else facts["deviation"] | answer
        finding = line(target, facts, "exactness").finding
        assert (finding.status, bool(finding.remedy)) == (status, status == "warning")
        assert words in finding.fact

    def test_products_that_are_not_row_invariant_are_named_and_in_order(self, target):
        facts = laptop_facts()
        facts["engine"] |= {"row_invariant": {"bfloat16": True, "float32": False}}
        finding = line(target, facts, "products").finding
        assert finding.status == "ok"
        assert finding.fact == "bfloat16: row-invariant, float32: not row-invariant"

    def test_bfloat16_without_instructions_for_it_is_a_warning(self, target):
        facts = laptop_facts()
        facts["engine"] |= {"dtype": "bfloat16"}
        finding = line(replace(target, dtype="bfloat16"), facts, "number type").finding
        assert (finding.status, "--dtype auto" in finding.remedy) == ("warning", True)

    def test_a_processor_without_vectors_is_a_warning_where_it_computes(self, target):
        facts = laptop_facts()
        facts["host"] |= {"processor": {"model": "old", "instructions": []}}
        assert line(target, facts, "processor").finding.status == "warning"
        facts["engine"] |= {"device": "cuda"}
        assert line(target, facts, "processor").finding.status == "ok"

    def test_memory_counts_the_first_models_weights_and_all_caches(self, target):
        finding = line(target, laptop_facts(), "memory").finding
        assert finding.fact == "8.0 GiB of memory free; weights and caches take up to 5.5"

    def test_more_than_fits_is_a_warning_with_the_settings_to_lower(self, target):
        facts = laptop_facts()
        facts["host"] |= {"memory": {"total_bytes": 4 * GIB, "free_bytes": 4 * GIB}}
        finding = line(target, facts, "memory").finding
        assert finding.status == "warning"
        assert "--engine-kv-cache-bytes" in finding.remedy

    def test_on_a_gpu_it_is_the_gpus_memory(self, target):
        facts = healthy_facts() | {"models": laptop_facts()["models"]}
        finding = line(target, facts, "memory").finding
        assert finding.fact == "79.0 GiB of GPU memory free; weights and caches take up to 5.3"

    def test_a_model_that_is_not_there_blocks(self, target):
        facts = laptop_facts() | {"models": {"a/b": {"error": "no model at /nowhere"}}}
        assert line(target, facts, "models").finding.fact == "a/b: no model at /nowhere"
        assert line(target, facts, "models").blocks

    def test_a_default_model_that_was_not_fetched_is_a_warning(self, target):
        finding = line(
            replace(target, models=()), laptop_facts() | {"models": {}}, "models"
        ).finding
        assert finding.status == "warning"
        assert "tinkercloud fetch" in finding.remedy

    def test_the_target_has_the_settings_that_size_it(self, tmp_path):
        served = (ModelSource("a/b", Path("/models/b")),)
        target = target_of(Config(data_dir=tmp_path, models=served), {})
        assert (target.models, target.cache_bytes) == (served, 5 * GIB)
