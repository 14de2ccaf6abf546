"""systemd reads its unit; the proxy's file has the server's limits."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import serving
from tinkercloud.config import Config

DEPLOY = serving.ROOT / "docs" / "deploy"
UNIT, PROXY = DEPLOY / "tinkercloud.service", DEPLOY / "nginx.conf"


def test_systemd_finds_nothing_in_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = UNIT.read_text(encoding="utf-8")
    command = "/opt/tinkercloud/bin/tinkercloud"
    assert f"ExecStart={command} serve" in text
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(command, "/bin/true"), encoding="utf-8")
    check = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_waits_longer_than_a_stop_may_take() -> None:
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(encoding="utf-8"), re.M)
    assert int(timeout_s) > Config().drain_s + 20


def test_the_proxys_limits_are_those_of_the_server() -> None:
    text, config = PROXY.read_text(encoding="utf-8"), Config()
    assert f"client_max_body_size {config.max_body_bytes // 1024**3}g;" in text
    assert f"client_header_timeout {config.head_timeout_s:g}s;" in text
    assert f"client_body_timeout {config.body_timeout_s:g}s;" in text
