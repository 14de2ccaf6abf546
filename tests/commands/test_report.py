"""`tinkercloud report`, against a real server; and what is reported by the client itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

from tests import serving
from tinker_gmi.connection.errors import NotFoundError
from tinker_gmi.run_metrics import RunMetrics
from tinkercloud.cli import main


@pytest.fixture
def run_id(sdk_server: serving.Server) -> str:
    """Of the official client."""
    service = tinker.ServiceClient()
    return service.create_lora_training_client(base_model="fake/tiny", rank=4).result().model_id


def reported(run_id: str) -> dict[int, dict[str, float]]:
    with RunMetrics() as metrics:
        return {point["step"]: point["metrics"] for point in metrics.reported(run_id)}


def line(**fields: object) -> str:
    return json.dumps(fields) + "\n"


def test_numbers_of_a_file_are_reported_by_step(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(step=0, **{"env/all/reward/total": 0.25, "optim/lr": 1e-4, "progress/done": True})
        + line(tokens=7)
        + line(step=1, note="no number")
        + "\n"
        + line(step=2, reward=float("nan"), kl=0.5).rstrip("\n")
    )
    assert main(["report", run_id, str(path)]) == 0
    assert reported(run_id) == {
        0: {"env/all/reward/total": 0.25, "optim/lr": 1e-4},
        2: {"kl": 0.5},
    }
    assert capsys.readouterr().out == "reported 2 lines, the last of step 2\n"


def test_a_file_is_followed_as_it_grows(run_id: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = line(step=1, reward=0.5), line(step=2, reward=0.75)
    path.write_text(first + second[:9])
    command = [sys.executable, "-m", "tinkercloud", "report", run_id, str(path), "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=serving.ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reported 1 lines, the last of step 1\n"
        assert reported(run_id) == {1: {"reward": 0.5}}
        with path.open("a") as file:
            file.write(second[9:])
        assert process.stdout.readline() == "reported 1 lines, the last of step 2\n"
        assert reported(run_id) == {1: {"reward": 0.5}, 2: {"reward": 0.75}}
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def test_many_points_are_reported_in_pieces(run_id: str) -> None:
    with RunMetrics() as metrics:
        metrics.report_many(run_id, ((step, {"reward": step / 2500}) for step in range(2500)))
        numbers = [0]
        while page := metrics.reported(run_id, after=numbers[-1]):
            numbers += [point["number"] for point in page]
        assert len(numbers) == 2501
        metrics.report(run_id, 3, reward=1.0, length=12)
        (point,) = metrics.reported(run_id, after=numbers[-1])
    assert (point["step"], point["metrics"]) == (3, {"reward": 1.0, "length": 12})


def test_what_cannot_be_reported_is_a_sentence(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert main(["report", run_id, str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    path.write_text("step 1: reward 0.5\n")
    assert main(["report", run_id, str(path)]) == 1
    assert f"{path}: line 1 is no JSON object" in capsys.readouterr().err
    path.write_text(line(step=1, reward=0.5))
    assert main(["report", "no-run", str(path)]) == 1
    assert "no-run" in capsys.readouterr().err
    with RunMetrics() as metrics, pytest.raises(NotFoundError):
        metrics.report("no-run", 1, reward=0.5)
