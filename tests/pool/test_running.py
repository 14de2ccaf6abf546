"""A pool's processes with fakes of llama.cpp's programs: start, death, refusal, swap, stop."""

import json
import os
import signal
import subprocess
import sys
import time
from operator import not_
from pathlib import Path

import httpx
import pytest

from tests.pool.pool_guard import processes_of
from tests.pool.pools import LIMIT_S, Pool, end, fake_programs
from tests.ports import reserved_ports
from tests.serving import QUIET, ROOT, command
from tests.waiting import wait_for, wait_for_line


def started(pool: Pool, *arguments: str) -> str:
    done = pool.command("start", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def server_arguments(pool: Pool) -> list[str]:
    log = (pool.folder.path / "llama-server.log").read_text()
    return json.loads(log.partition("arguments: ")[2].splitlines()[0])


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_pool_starts_answers_swaps_and_stops(pool: Pool) -> None:
    shown = started(pool)
    assert "worker a is up" in shown and "small: ready at http://127.0.0.1:" in shown
    answer = httpx.get(f"{pool.state.url}/models", trust_env=False).json()
    assert answer["data"][0]["id"] == "small"
    arguments = server_arguments(pool)
    split = arguments[arguments.index("--tensor-split") + 1].split(",")
    assert sum(map(int, split)) == 31
    assert arguments[arguments.index("--device") + 1] == "RPC0,RPC1"
    assert pool.command("status").returncode == 0
    assert "runs already" in pool.command("start").stderr

    swapped = pool.command("swap", "large")
    assert swapped.returncode == 0 and "large: ready" in swapped.stdout
    refused = pool.command("swap", "huge")
    assert refused.returncode == 1 and "bytes (" in refused.stdout
    assert "add a worker or memory" in refused.stdout
    assert "it has: small, large, huge" in pool.command("swap", "absent").stderr
    assert pool.command("swap", "small").returncode == 0

    pids = [pool.worker_pid(name, kind) for name in "ab" for kind in ("worker", "rpc")]
    assert "== " in pool.command("logs", "llama-server").stdout
    assert "there is: llama-server, pool, " in pool.command("logs", "nothing").stderr
    assert pool.command("stop").stdout == "stopped\n"
    assert all(map(has_ended, pids))
    assert pool.command("status").returncode == 1


@pytest.mark.parametrize("program", ["worker", "rpc"])
def test_a_dead_worker_is_named_within_seconds_and_the_model_goes_on_without_it(
    pool: Pool, program: str
) -> None:
    started(pool)
    end(pool.worker_pid("b", program))
    killed = time.monotonic()
    state = pool.await_state(lambda state: state.workers["b"] != "up")
    assert time.monotonic() - killed < 30.0  # two as a rule; the looks for it take their time too
    assert "ended" in state.workers["b"]
    state = pool.await_state(lambda state: state.phase == "ready" and len(state.plan) == 1)
    assert state.plan[0].startswith("a/CPU")
    assert "worker b is dead" in pool.folder.log.read_text()
    # it is started again, and counted on from the next model on
    pool.await_state(lambda state: state.workers["b"] == "up")
    assert pool.command("swap", "large").returncode == 0


def test_a_model_that_does_not_fit_on_what_is_left_is_refused_and_comes_back(pool: Pool) -> None:
    started(pool, "large")
    end(pool.worker_pid("a", "worker"))
    state = pool.await_state(lambda state: state.phase == "refused")
    assert "are missing" in state.text and "b/CPU 360.0 MiB" in state.text
    state = pool.await_state(lambda state: state.phase == "ready")
    assert len(state.plan) == 2


def test_llama_server_that_ends_by_itself_is_started_again_and_then_given_up(pool: Pool) -> None:
    started(pool)
    for _ in range(2):
        pid = pool.state.llama_server_pid
        assert pid is not None
        end(pid)
        pool.await_state(lambda state, pid=pid: state.llama_server_pid not in (pid, None))
        pool.await_state(lambda state: state.phase == "ready")
    assert pool.state.llama_server_pid is not None
    end(pool.state.llama_server_pid)
    assert "llama-server ended 3 times" in pool.await_state(lambda s: s.phase == "failed").text


def test_a_pool_that_is_killed_leaves_no_process(pool: Pool) -> None:
    started(pool)
    state = pool.state
    pids = [pool.worker_pid(name, kind) for name in "ab" for kind in ("worker", "rpc")]
    assert state.llama_server_pid is not None
    end(state.pid)
    pids.append(state.llama_server_pid)
    wait_for("all have ended", lambda: [pid for pid in pids if not has_ended(pid)], not_)
    started(pool)


def test_tests_that_are_killed_leave_no_pool(smollm2_gguf: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed_tests.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.pool.pools import fake_programs, write_pool\n"
        "gguf, folder = sys.argv[1:]\n"
        "programs = fake_programs(Path(folder))\n"
        "model = {'name': 'small', 'path': gguf, 'context': 1024, 'ubatch': 64}\n"
        "pool = write_pool(Path(folder), [model], [], llama_server=programs['server'],\n"
        "    memory='360MiB')\n"
        "assert pool.command('start').returncode == 0\n"
        "print(pool.file, pool.state.pid, pool.state.llama_server_pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(smollm2_gguf), str(tmp_path)],
        cwd=ROOT, env=os.environ | QUIET | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    file, *pids = done.stdout.split()
    wait_for(
        "all have ended",
        lambda: [*processes_of({file}), *(pid for pid in pids if not has_ended(int(pid)))],
        not_,
    )


def test_a_worker_behind_ssh_is_started_and_reached_through_its_tunnel(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh is a script here that runs the command on this machine, and relays the ports."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/pool/fake_ssh.py "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    text = pool.file.read_text().replace('"start": "local"', '"start": "ssh"', 1)
    command = tmp_path / "remote-tinkercloud"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tinkercloud "$@"\n')
    command.chmod(0o755)
    values = json.loads(text)
    values["workers"][0] |= {"host": "ada@laptop", "command": str(command)}
    pool.file.write_text(json.dumps(values))
    started(pool, "large")
    assert [line.split()[0] for line in pool.state.plan] == ["a/CPU", "b/CPU"]
    own_ports = {str(worker["port"] + 1) for worker in values["workers"][:1]}
    arguments = server_arguments(pool)
    used = {place.split(":")[1] for place in arguments[arguments.index("--rpc") + 1].split(",")}
    assert not own_ports & used  # the tunnel's end, not the worker's own port


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--listen", "nowhere"), "is not HOST:PORT"),
        (("--listen", "0.0.0.0:50900"), "no authentication"),
        (("--listen", "0.0.0.0:50900", "--unencrypted-network"), "needs a key"),
        (("--listen", "127.0.0.1:50900", "--rpc-server", "/no/such/program"), "no program"),
        (("--listen", "127.0.0.1:50900", "--key-file", "/no/such/file"), "cannot read the key"),
    ],
)
def test_a_worker_that_cannot_work_says_why(
    arguments: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    programs = fake_programs(tmp_path)
    places = ("--rpc-server", programs["rpc"], "--data-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tinkercloud", "pool", "worker", *places, *arguments],
        cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 2 and what in done.stderr


def test_a_worker_by_hand_with_a_key_answers_only_to_it(pool: Pool, tmp_path: Path) -> None:
    values = json.loads(pool.file.read_text())
    port, key_file = reserved_ports(3), tmp_path / "worker.key"
    key_file.write_text("a-worker-s-key")
    values["workers"][0] |= {"start": "by_hand", "port": port}
    pool.file.write_text(json.dumps(values))
    log = tmp_path / "worker.log"
    flags = {
        "--key-file": key_file,
        "--listen": f"127.0.0.1:{port}",
        "--rpc-server": values["workers"][0]["rpc_server"],
        "--data-dir": tmp_path / "worker",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    with command("pool", "worker", *words, log=log) as worker:
        wait_for_line("ready: ", log, worker)
        refused = pool.command("start")
        assert refused.returncode == 1 and "a wants its key" in refused.stdout
        values["workers"][0]["key_file"] = str(key_file)
        pool.file.write_text(json.dumps(values))
        started(pool, "large")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LIMIT_S) == 0
        state = pool.await_state(lambda state: state.phase == "refused")
        assert "a" in state.workers and state.workers["a"] != "up"
