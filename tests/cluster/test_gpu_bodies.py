"""The bodies of tests/gpu, on a CPU."""

from pathlib import Path

from tests.cluster.cpu import spawn
from tests.cluster.cpu.tiny import write_model
from tests.cluster.plans import tiny_plan
from tests.gpu import bodies


def test_a_rank_trains_as_the_embedded_backend_and_frees_what_it_offloads(tmp_path: Path):
    folder = write_model("qwen3", tmp_path / "model")
    prepare = "tinkercloud.cluster.cpu.ranks:prepare"
    (found,) = spawn.run(bodies.trained, 1, folder, tiny_plan(folder, 1), prepare)
    bodies.compare(found, bodies.embedded(folder, "cpu"))
