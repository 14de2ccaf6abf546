"""The wheel: what is in it, and that a server runs from it where there is no checkout."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.serving import ROOT, Server, running
from tinkercloud.embedded.native import build, compiler
from tinkercloud.embedded.native.instruction_sets import X86_64

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("tinkercloud", "tinker_gmi")
SAMPLE = """
import sys, tinker
from tinker import types

service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model=sys.argv[1])
prompt = types.ModelInput.from_ints([1, 2, 3])
params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=7)
print(len(sampler.sample(prompt, num_samples=2, sampling_params=params).result().sequences))
"""


@dataclass(frozen=True)
class Installation:
    """A virtual environment with the wheel, and a folder without code to run in."""

    environment: Path
    folder: Path

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment. PYTHONPATH is left out: it names the checkout."""
        program = str(self.environment / "bin" / command[0])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TINKERCLOUD_")}
        inherited.pop("PYTHONPATH", None)
        return subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def server(self, data_dir: Path, *arguments: str, **variables: str) -> Server:
        environment = {"PYTHONPATH": "", **variables}
        return Server(arguments, data_dir, environment, python=self.python, folder=self.folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, so that neither a `build` folder comes into it nor one into the checkout."""
    copy, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        unneeded = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=unneeded)
    for name in ("pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(target), str(copy))
    (built,) = target.glob("*.whl")
    return built


def pip(command: str, *arguments: str, python: str = sys.executable) -> None:
    """Without a network and without dependencies."""
    program = [sys.executable, "-m", "pip", "--python", python, "--quiet", command]
    offline = ["--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run([*program, *offline, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel and what its extra `embedded` asks for, nothing else of this environment."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    installation = Installation(environment, tmp_path_factory.mktemp("elsewhere"))
    pip("install", str(wheel), python=installation.python)
    site = Path(sysconfig.get_path("platlib", vars={"platbase": str(environment)}))
    (ours,) = metadata.distributions(name=PROJECT["name"], path=[str(site)])
    for distribution in requirements(ours, "embedded").values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(distribution.locate_file(name))))
    return installation


def requirements(ours: metadata.Distribution, extra: str) -> dict[str, metadata.Distribution]:
    """By name: what a distribution with an extra needs, and what that needs, of what is here."""
    distributions = {PROJECT["name"]: ours}
    ahead, seen = [Requirement(f"{PROJECT['name']}[{extra}]")], set[str]()
    while ahead:
        requirement = ahead.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name not in distributions:
            distributions[name] = metadata.distribution(name)
        extras = [{"extra": extra} for extra in ("", *requirement.extras)]
        for needed in map(Requirement, distributions[name].requires or ()):
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                ahead.append(needed)
    del distributions[PROJECT["name"]]
    return distributions


def sample(server: Server, base_model: str) -> subprocess.CompletedProcess[str]:
    """By the official client of the test environment."""
    command = [sys.executable, "-c", SAMPLE, base_model]
    environment = {**os.environ, **server.sdk_environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kinds = {Path(name).suffix for name in sources}
    assert {".c", ".h", ".sql", ".proto", ".typed", ".py"} <= kinds
    carried = {name for name in contents(wheel) if name.endswith(".so")}
    assert {name for name in contents(wheel) if ".dist-info/" not in name} - carried == sources


@pytest.mark.skipif(platform.machine() != "x86_64", reason="libraries are for x86-64 only")
def test_the_wheel_carries_the_kernels_for_every_instruction_set_of_its_platform(
    wheel: Path,
) -> None:
    folder = build.CARRIED.relative_to(ROOT).as_posix()
    names = {f"{folder}/{build.file_name(chosen)}" for chosen in X86_64}
    assert {name for name in contents(wheel) if name.endswith(".so")} == names
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    (name,) = (name for name in contents(wheel) if name.endswith("licenses/LICENSE"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert PROJECT["license"] == "Apache-2.0"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_package_is_the_wheels(installed: Installation, package: str) -> None:
    code = f"import {package}; print({package}.__file__)"
    location = installed.run("python", "-c", code).stdout.strip()
    assert Path(location).is_relative_to(installed.environment)


def test_the_command_says_its_version(installed: Installation) -> None:
    assert installed.run("tinkercloud", "version").stdout.startswith("tinkercloud ")


@pytest.mark.slow
def test_doctor_says_that_the_embedded_backend_can_run(
    installed: Installation, folder: Path
) -> None:
    done = installed.run("tinkercloud", "doctor", "--port", "0", "--model", f"tiny={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "can run here" in done.stdout


def test_the_fake_backend_serves_the_official_client(
    installed: Installation, tmp_path: Path
) -> None:
    with running(installed.server(tmp_path / "data", "--backend", "fake")) as server:
        done = sample(server, "fake/tiny")
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize(
    "is_carried",
    [
        pytest.param(True, id="carried"),
        pytest.param(False, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_the_engine_uses_the_kernels_of_the_wheel_or_compiles_its_sources(
    installed: Installation,
    folder: Path,
    tmp_path: Path,
    is_carried: bool,
    request: pytest.FixtureRequest,
) -> None:
    arguments = ("--model", f"tiny={folder}", "--dtype", "float32", "--speculate", "off")
    cache, (carried,) = tmp_path / "cache", installed.environment.rglob("native/compiled")
    if not is_carried:
        request.addfinalizer(partial(carried.with_name("away").rename, carried))
        carried.rename(carried.with_name("away"))
    variables = {"XDG_CACHE_HOME": str(cache)} | ({"CC": "/none/cc"} if is_carried else {})
    with running(installed.server(tmp_path / "data", *arguments, **variables)) as server:
        done = sample(server, "tiny")
        with server.http() as client:
            health = client.get("/health").json()
    assert done.stdout == "2\n", done.stderr + server.output()
    assert health["backend"]["instruction_set"] == compiler.instruction_set()
    assert bool(list(cache.rglob("*.so"))) != is_carried, server.output()
