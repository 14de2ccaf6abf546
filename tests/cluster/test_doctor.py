"""The doctor asks a real Ray: one that it starts, one that runs, and one that is not there."""

import socket
import sys
from dataclasses import replace

import pytest

from tinkercloud.doctor.checks import BY_NAME
from tinkercloud.doctor.diagnosis import Line, diagnose
from tinkercloud.doctor.facts import gather
from tinkercloud.doctor.target import Target


def ray_line(target: Target, name: str) -> Line:
    """One of Ray's lines, from the answer of the Ray probe alone."""
    check = BY_NAME[name]
    return diagnose(target, gather(target, check.reads), [check]).lines[0]


@pytest.fixture
def target(tmp_path):
    return Target("cluster", tmp_path, python=sys.executable, needs_gpus=False)


@pytest.fixture(scope="module")
def two_nodes():
    """Address of a Ray of two nodes; nothing in this process is connected to it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def test_a_local_ray_starts_and_leaves_nothing_in_the_data_directory(target):
    line = ray_line(target, "Ray")
    assert line.finding.status == "ok", line.finding.fact
    assert list(target.data_dir.iterdir()) == []


def test_every_node_of_a_running_ray_is_named(target, two_nodes):
    line = ray_line(replace(target, ray_address=two_nodes), "Ray's nodes")
    assert line.finding.status == "ok"
    assert line.finding.fact.count("GPUs") == 2


def test_every_node_sees_the_data_directory_and_has_the_same_versions(target, two_nodes):
    there = replace(target, ray_address=two_nodes)
    assert ray_line(there, "shared data").finding.fact.endswith("is seen by 2 nodes")
    assert ray_line(there, "same versions").finding.fact == "2 nodes agree"


def test_an_address_where_no_ray_answers_blocks_and_says_what_to_try(target):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        line = ray_line(replace(target, ray_address=address, timeout_s=200.0), "Ray")
    assert line.blocks
    assert address in line.finding.fact
    assert "ray health-check --address" in line.finding.remedy
