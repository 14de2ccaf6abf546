"""The demonstration and the recipe that kills its server: both start a server themselves."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.own_recipes import LIMIT_S, figures, is_picture
from tests.serving import QUIET, ROOT


@pytest.fixture
def demo_environment(smollm2_gguf: Path, tmp_path: Path) -> dict[str, str]:
    """The weights where `make install` puts them, below a data directory of the test's own."""
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    (models / smollm2_gguf.name).symlink_to(smollm2_gguf)
    place = {"TINKERCLOUD_DATA_DIR": str(tmp_path / "data"), "TMPDIR": str(tmp_path)}
    return {**os.environ, **QUIET, **place, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_a_kill_of_the_server_changes_no_bit_of_a_run(
    demo_environment: dict[str, str], tmp_path: Path
):
    quick = ("--steps", "3", "--kill-at", "2", "--batch-size", "4", "--held-out", "2")
    command = [sys.executable, str(ROOT / "cookbook" / "resume_after_kill.py"), *quick]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=demo_environment, capture_output=True,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed; starting it again" in done.stdout
    assert "every loss and every answer is the same, to the last bit" in done.stdout
    found = figures(tmp_path / "out", "resume_after_kill")
    assert found["killed"] == found["plain"]
    assert found["plain"][-1] < found["plain"][0]
    assert is_picture(tmp_path / "out" / "resume_after_kill.png")


def start_demo(environment: dict[str, str], out: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "cookbook" / "demo.py"), "--out", str(out)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def answers(port: str) -> bool:
    """Whether anything listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_demo_ends_its_server_and_leaves_nothing(
    demo_environment: dict[str, str], tmp_path: Path, how: signal.Signals
):
    demo = start_demo(demo_environment, tmp_path / "out")
    said = ""
    while (serving := re.search(r"^serving at http://127.0.0.1:(\d+)", said, re.M)) is None:
        line = demo.stdout.readline()
        assert line, said
        said += line
    port = serving[1]
    assert answers(port)
    time.sleep(1.0)
    demo.send_signal(how)
    rest = demo.communicate(timeout=LIMIT_S)[0]
    assert demo.returncode == 128 + how, rest
    assert not answers(port)
    assert "Traceback" not in rest
    assert not list(tmp_path.glob("tinkercloud-demo-*"))


SIGNALS = pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])


def cookbook_script(text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """With the folder's modules."""
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, **QUIET, "PYTHONPATH": f"{ROOT / 'cookbook'}:{ROOT}"},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


@SIGNALS
def test_a_signal_is_heard_without_a_word_where_python_would_drop_an_exception(how: str):
    done = cookbook_script(f"""if True:
        import os, signal, time
        from lib import interrupts
        class Last:
            def __del__(self):
                os.kill(os.getpid(), signal.{how})
        interrupts.remember_signals()
        try:
            Last()
            interrupts.run(lambda: time.sleep(50))
        except interrupts.Interrupted as ended:
            print(ended.status)
    """)
    assert (done.stdout, done.stderr) == (f"{128 + signal.Signals[how]}\n", "")


@SIGNALS
def test_a_signal_before_the_server_is_started_leaves_none(how: str, tmp_path: Path):
    done = cookbook_script(
        f"""if True:
        import demo, os, pathlib, signal, sys
        demo.interrupts.remember_signals()
        os.kill(os.getpid(), signal.{how})
        try:
            demo.Running.start(pathlib.Path(sys.argv[1]), pathlib.Path("weights"))
        except demo.interrupts.Interrupted:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                print("no child is left")
        """,
        str(tmp_path),
    )
    assert "no child is left" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "server.log").exists()  # it was started


def test_a_server_that_was_ended_is_not_started_again(tmp_path: Path):
    done = cookbook_script(
        """if True:
        import demo, os, pathlib, sys
        scratch = pathlib.Path(sys.argv[1])
        weights = scratch / "weights"
        with demo.Running(scratch, weights, demo.launch(scratch, weights), "http://x:1") as server:
            pass
        server.restart()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            print("no child is left")
        """,
        str(tmp_path),
    )
    assert "no child is left" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_demo_learns_both_tasks_and_leaves_a_picture(
    demo_environment: dict[str, str], tmp_path: Path
):
    out = tmp_path / "out"
    demo = start_demo(demo_environment, out)
    said = demo.communicate(timeout=1800)[0]
    assert demo.returncode == 0, said
    sft, rl = figures(out, "sft"), figures(out, "rl")
    assert sft["values"][-1] < 0.2 * sft["values"][0]
    assert sft["before"]["accuracy"] < 0.1
    assert sft["after"]["accuracy"] > 0.7
    assert sum(rl["values"][-3:]) > sum(rl["values"][:3]) + 0.6
    assert rl["after"]["accuracy"] > rl["before"]["accuracy"] + 0.3
    assert is_picture(out / "demo.png")
    assert "TINKER_BASE_URL" in said
