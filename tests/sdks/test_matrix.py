"""Every feature with every SDK version, and the same numbers from all of them."""

import sys
from collections.abc import Iterator
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest

from tests import serving
from tests.sdks import matrix

SMOLLM2 = "SmolLM2-135M-Instruct"
RATE = 1e-3


def environment(version: str) -> Path:
    python = matrix.interpreter(version)
    if not python.exists():
        pytest.fail(f"no environment with tinker {version}; run `make sdks`", pytrace=False)
    return python


@pytest.fixture(scope="module")
def reference(fake_server: serving.Server) -> dict[str, Any]:
    """The scenario with the SDK of this environment."""
    return matrix.run_scenario(Path(sys.executable), fake_server, matrix.FAKE_MODEL)


@pytest.fixture(scope="module")
def smollm2_server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[serving.Server]:
    data_dir = tmp_path_factory.mktemp("smollm2") / "data"
    model = f"{SMOLLM2}={smollm2_gguf}"
    # float32: sampled and trained log-probabilities are then equal within 1e-4. A short hold: each
    # SDK sees answers that nothing is there yet.
    arguments = ("--backend", "embedded", "--dtype", "float32", "--hold-s", "0.05")
    arguments += ("--model", model)
    with serving.start_server(*arguments, data_dir=data_dir) as server:
        yield server


@pytest.mark.slow
def test_the_sdk_of_this_environment_does_everything(reference: dict[str, Any]) -> None:
    assert matrix.faults(reference) == ""


def test_the_newest_tested_version_is_the_installed_one() -> None:
    assert matrix.versions()[-1] == installed_version("tinker")


@pytest.mark.slow
@pytest.mark.parametrize("version", matrix.versions())
def test_an_sdk_does_everything_with_the_same_numbers(
    version: str, fake_server: serving.Server, reference: dict[str, Any]
) -> None:
    report = matrix.run_scenario(environment(version), fake_server, matrix.FAKE_MODEL)
    assert report["version"] == version
    assert matrix.faults(report) == ""
    for name, feature in report["features"].items():
        expected = reference["features"][name]["result"]
        if name not in ("expiry", "unload", "download"):  # not in all of them, or other files
            assert feature["result"] == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("version", matrix.versions())
def test_an_sdk_trains_real_weights_with_the_same_numbers(
    version: str, smollm2_server: serving.Server, real_reference: dict[str, Any]
) -> None:
    report = matrix.run_scenario(environment(version), smollm2_server, SMOLLM2, RATE)
    assert matrix.faults(report) == ""
    for name in ("sft", "forward", "rl", "custom_loss", "resume", "sample_saved"):
        expected = real_reference["features"][name]["result"]
        assert flat(report["features"][name]["result"]) == pytest.approx(
            flat(expected), rel=1e-4, abs=1e-4
        ), name
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert adapter <= set(report["features"]["download"]["result"])


@pytest.fixture(scope="module")
def real_reference(smollm2_server: serving.Server) -> dict[str, Any]:
    return matrix.run_scenario(Path(sys.executable), smollm2_server, SMOLLM2, RATE)


def flat(value: Any) -> list[float]:
    """Every number of a JSON value, in its order."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in flat(part)]
    if isinstance(value, list):
        return [number for part in value for number in flat(part)]
    return [value] if isinstance(value, int | float) else []


def test_the_page_has_the_table_of_the_results() -> None:
    results = matrix.read_results()
    assert list(results) == matrix.versions()
    text = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.MARK.search(text)
    assert matrix.with_table(text, results) == text


def test_no_feature_is_recorded_as_failing() -> None:
    for version, verdicts in matrix.read_results().items():
        assert set(verdicts.values()) <= {"works", "absent"}, (version, verdicts)
