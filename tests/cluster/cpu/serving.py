"""Flags of `tinkercloud serve` for the cluster backend on one machine without a GPU."""

import shlex

from tests.cluster.cpu.engines import sglang_command

SMALL = ("--max-total-tokens", "20000", "--max-running-requests", "8")


def cluster_arguments(
    *, ranks: int = 1, max_seq_len: int | None = None, **sizes: int
) -> tuple[str, ...]:
    """ranks: training processes; sizes: tp, pp, cp, ep, dp."""
    flags = {
        "backend": "cluster",
        "cluster-gpus": ranks,
        "cluster-gpus-per-node": ranks,
        "cluster-gpu-memory-bytes": "16G",
        "cluster-device": "cpu",
        "cluster-sglang-command": shlex.join(sglang_command()),
        "cluster-sglang-args": shlex.join(SMALL),
        "cluster-start-timeout-s": 240,
        "cluster-operation-timeout-s": 240,
        **{f"cluster-{name}": size for name, size in sizes.items()},
    }
    if max_seq_len is not None:
        flags["cluster-max-seq-len"] = max_seq_len
    return tuple(f"--{name}={value}" for name, value in flags.items())
