"""A package that is not installed is one sentence with the right extra, on every command."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.serving import ROOT
from tinkercloud.commands.options import EXTRAS

# Where a distribution is imported by another name.
IMPORTED_AS = {
    "megatron-core": "megatron",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "grpcio": "grpc",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "torch-memory-saver": "torch_memory_saver",
    "transformer-engine": "transformer_engine",
    "sglang-router": "sglang_router",
}
BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from tinkercloud.cli import main
sys.exit(main({arguments!r}))
"""
SERVER, EMBEDDED = set(EXTRAS["server"]), set(EXTRAS["embedded"])


def without(missing: set[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line where these packages cannot be imported."""
    code = BARE.format(missing=missing, arguments=[*arguments, "--data-dir", str(folder)])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (("serve",), SERVER | EMBEDDED, "server"),
        (("serve",), EMBEDDED, "embedded"),
        (("serve", "--backend", "cluster"), {"ray", "megatron"}, "cluster"),
        (
            ("serve", "--backend", "fake", "--otlp-endpoint", "http://127.0.0.1:9"),
            {"opentelemetry"},
            "telemetry",
        ),
        (("models",), SERVER | EMBEDDED, "embedded"),
        (("bench", "speculation"), SERVER | EMBEDDED, "embedded"),
        (("draft", "status"), SERVER | EMBEDDED, "embedded"),
        (("draft", "list"), SERVER | EMBEDDED, "embedded"),
        (("draft", "collect"), SERVER | EMBEDDED, "embedded"),
        (("draft", "train"), SERVER | EMBEDDED, "embedded"),
        (("draft", "evaluate"), SERVER | EMBEDDED, "embedded"),
        (("draft", "use", "x"), SERVER | EMBEDDED, "embedded"),
        (("draft", "rollback"), SERVER | EMBEDDED, "embedded"),
        (("keys", "list"), {"aiosqlite"}, None),
        pytest.param(("doctor",), EMBEDDED, None, marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_missing_is_a_sentence_with_the_extra(tmp_path, arguments, missing, extra):
    done = without(missing, tmp_path, *arguments)
    assert "Traceback" not in done.stderr
    if extra is None:
        assert done.stderr == ""
        return
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tinkercloud: ")
    assert f"pip install 'tinkercloud[{extra}]'" in done.stderr


def test_the_table_of_extras_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, packages in EXTRAS.items():
        names = [Requirement(text).name for text in project["optional-dependencies"][extra]]
        expected = {IMPORTED_AS.get(name, name) for name in names if name != "tinkercloud"}
        assert set(packages) - {"starlette"} == expected, extra  # FastAPI brings it
