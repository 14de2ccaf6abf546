"""Real Ray clusters of one machine, small and quiet, and what they must not keep."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.waiting import wait_for

STORE_BYTES = 200 * 1024 * 1024
SETTLE_S = 120.0

# Before Ray is imported anywhere: its processes inherit these.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A Ray that finds no token would write one into the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "of the tests")
# Lost nodes are noticed in a second rather than in half a minute.
os.environ.setdefault("RAY_health_check_initial_delay_ms", "500")
os.environ.setdefault("RAY_health_check_period_ms", "500")
os.environ.setdefault("RAY_health_check_timeout_ms", "1000")
os.environ.setdefault("RAY_health_check_failure_threshold", "3")

NODE: dict[str, Any] = {
    "include_dashboard": False,
    "object_store_memory": STORE_BYTES,
}


@contextmanager
def two_nodes(cpus: int = 4) -> Iterator[Any]:
    """Two simulated nodes with `cpus` virtual CPUs each; connected."""
    import ray
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of its start
        cluster = Cluster(
            initialize_head=True, connect=False, head_node_args={**NODE, "num_cpus": cpus}
        )
        cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def one_node(cpus: int = 4) -> Iterator[None]:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",  # not another Ray that happens to run on this machine
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address="127.0.0.1",
        )
    try:
        yield
    finally:
        ray.shutdown()


def groups_alive() -> list[str]:
    """Names (as requested) of the placement groups that hold or want resources."""
    from ray.util import placement_group_table

    table = placement_group_table()
    return [row["name"].partition("#")[0] for row in table.values() if row["state"] != "REMOVED"]


def taken_cpus() -> float:
    import ray

    return ray.cluster_resources().get("CPU", 0.0) - ray.available_resources().get("CPU", 0.0)


def wait_until_settled() -> None:
    """Until no placement group and no taken CPU are left; AssertionError where some are.

    Every actor and task holds a share of a CPU, so that one left behind shows here.
    """
    wait_for(
        "nothing is left behind (placement groups, CPUs)",
        lambda: (groups_alive(), taken_cpus()),
        lambda left: left == ([], 0.0),
        limit_s=SETTLE_S,
        poll_s=0.1,
    )
