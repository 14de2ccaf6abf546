"""`tinkercloud pool`: what needs no processes."""

import os
from pathlib import Path

import pytest

from tinkercloud.cli import main
from tinkercloud.pool.pool_file import load_pool


def test_init_writes_a_file_that_plan_reads(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool_yaml = tmp_path / "pool.yaml"
    made = [
        *("pool", "init", "--file", str(pool_yaml), "--model", f"smollm2={smollm2_gguf}"),
        *("--worker", "local,CPU=300MiB", "--worker", "ada@laptop,CUDA0=1GiB,CPU=1GiB"),
        *("--worker", "127.0.0.1:50090,CPU=300MiB", "--memory", "400MiB", "--port", "9100"),
    ]
    assert main(made) == 0
    assert "on here-50090: tinkercloud pool worker" in capsys.readouterr().out
    pool = load_pool(pool_yaml)
    assert [worker.name for worker in pool.workers] == ["local0", "laptop", "here-50090"]
    assert [worker.start for worker in pool.workers] == ["local", "ssh", "by_hand"]
    assert main(["pool", "plan", "--file", str(pool_yaml)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("smollm2: 30 layers")
    assert "output" in lines[-1] and "of 1.0 GiB" in lines[-1]
    assert main(made) == 2
    assert "--force" in capsys.readouterr().err


def test_a_worker_on_an_open_network_needs_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["pool", "init", "--file", str(tmp_path / "p"), "--model", "m=m.gguf"]
    made += ["--worker", "10.0.0.2:50050"]
    assert main(made) == 2
    assert "no authentication" in capsys.readouterr().err
    assert main([*made, "--unencrypted-network"]) == 0


def test_inspect_shows_layers_and_tensors(
    smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "inspect", str(smollm2_gguf), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "30 of" in text and "token_embd.weight" in text and "trained for" in text


def test_distribute_hands_the_files_to_rsync(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rsync, asked = tmp_path / "rsync", tmp_path / "asked"
    rsync.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    place = ["--file", str(tmp_path / "p")]
    made = ["pool", "init", *place, "--model", f"m={smollm2_gguf}", "--worker", "ada@laptop"]
    assert main(made) == 0
    assert main(["pool", "distribute", *place, "--to", "weights"]) == 0
    assert asked.read_text().split()[-2:] == [str(smollm2_gguf), "ada@laptop:weights/"]
    rsync.write_text("#!/bin/sh\nexit 3\n")
    assert main(["pool", "distribute", *place]) == 2


def test_a_plan_without_memory_in_the_file_says_what_to_write(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["pool", "init", "--file", str(tmp_path / "p"), "--model", f"m={smollm2_gguf}"]
    assert main([*made, "--worker", "local"]) == 0
    assert main(["pool", "plan", "--file", str(tmp_path / "p")]) == 2
    assert "local0/CPU lends; write memory: 8GiB" in capsys.readouterr().err
