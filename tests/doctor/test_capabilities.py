"""What an installation can do, told from its facts."""

import pytest

from tests.doctor.machines import GPU, healthy_facts
from tinkercloud.doctor.capabilities import capabilities
from tinkercloud.doctor.target import Target


@pytest.fixture
def target(tmp_path):
    return Target("cluster", tmp_path)


def test_context_parallelism_needs_transformer_engine(target):
    facts = healthy_facts() | {"transformer-engine": {"error": "ModuleNotFoundError"}}
    kinds = capabilities(target, facts)["training parallelism"]
    assert not kinds["context"].available
    assert kinds["tensor"].available


def test_one_gpu_allows_no_parallelism(target):
    facts = healthy_facts()
    facts["torch"] |= {"gpus": [GPU]}
    kinds = capabilities(target, facts)["training parallelism"]
    assert not any(kind.available for kind in kinds.values())


def test_tensors_are_shared_by_one_torch_only(target):
    facts = healthy_facts()
    assert capabilities(target, facts)["weight sync"]["tensor"].available
    facts["sglang"] |= {"torch": "2.14.1"}
    sync = capabilities(target, facts)["weight sync"]
    assert {name: item.available for name, item in sync.items()} == {
        "tensor": False,
        "broadcast": True,
        "disk": True,
    }


def test_engines_give_memory_back_where_both_sides_have_the_saver(target):
    facts = healthy_facts()
    assert capabilities(target, facts)["memory offload"]["engines"].available
    facts["sglang"] |= {"torch_memory_saver": None}
    assert not capabilities(target, facts)["memory offload"]["engines"].available


def test_speculation_is_what_sglang_names(target):
    assert [*capabilities(target, healthy_facts())["speculative decoding"]] == ["EAGLE3", "NGRAM"]


def test_a_backend_that_cannot_run_names_what_is_missing(target):
    facts = healthy_facts() | {"sglang": {"error": "PackageNotFoundError"}}
    backends = capabilities(target, facts)["backends"]
    assert backends["embedded"].available
    assert backends["cluster"].how == "missing: SGLang, SGLang's kernels"
