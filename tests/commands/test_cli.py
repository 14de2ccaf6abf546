"""The command line, run in this process where that is possible and as a process where it serves."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.embedded.tiny import write_tiny_model
from tests.serving import ROOT, START_LIMIT_S, Server, ServerDidNotStart, start_server
from tinkercloud import __version__, cli, config, fetch
from tinkercloud.commands import options
from tinkercloud.server import base_url, listen, sole_owner


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch, tmp_path):
    for setting in config.settings().values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("TINKERCLOUD_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def run(capsys):
    """Status, standard output, standard error."""

    def invoke(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        written = capsys.readouterr()
        return status, written.out, written.err

    return invoke


def test_version_is_the_packages(run):
    assert run("version") == (0, f"tinkercloud {__version__}\n", "")


def test_python_m_is_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "tinkercloud", "version"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == f"tinkercloud {__version__}\n"


def test_a_reader_that_has_enough_ends_a_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        command = [sys.executable, "-m", "tinkercloud", "version"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (141, "")


def test_every_setting_has_its_help_with_its_default(run, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert [
        setting.name
        for setting in config.settings().values()
        if f"{setting.help} [{setting.shown_default}; {setting.variable}]" not in text
    ] == []


def test_a_mistake_is_one_line_and_status_2(run):
    status, out, err = run("serve", "--port", "http")
    assert (status, out) == (2, "")
    assert err == "tinkercloud: --port: 'http' is not a whole number\n"


def test_binding_elsewhere_without_authentication_is_refused(run):
    status, _, err = run("serve", "--host", "0.0.0.0", "--no-auth")
    assert status == 2
    assert "without authentication" in err


def test_an_unknown_backend_is_refused_with_the_known_ones(run):
    status, _, err = run("serve", "--backend", "gpu")
    assert status == 2
    assert "embedded, fake" in err


@pytest.mark.parametrize("drafter", ["suffix", "head:/drafts/one"])
def test_a_drafter_that_the_cluster_has_not_is_refused_in_a_sentence(run, drafter):
    model = ("--model", "m=/models/m")
    status, _, err = run("serve", "--backend", "cluster", *model, "--speculate", drafter)
    assert status == 2
    assert f"--speculate {drafter} is for the embedded backend" in err
    assert "--cluster-sglang-args" in err


def test_a_port_in_use_is_refused_before_anything_is_made(run, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, out, err = run("serve", "--backend", "fake", "--port", port)
    assert (status, out) == (2, "")
    assert f"cannot listen on 127.0.0.1 port {port}" in err
    assert not (tmp_path / "data").exists()


def test_a_data_folder_that_cannot_be_made_is_refused_in_a_sentence(run, tmp_path):
    (tmp_path / "file").write_text("")
    data = str(tmp_path / "file" / "data")
    status, out, err = run("serve", "--backend", "fake", "--port", "0", "--data-dir", data)
    assert (status, out) == (2, "")
    assert f"the data folder {data} cannot be written (Not a directory)" in err
    assert "--data-dir" in err


def test_a_data_folder_of_another_server_is_refused(run, tmp_path):
    """And all that is in it stays as it is: the first one's weights in the cache too."""
    data, cached = tmp_path / "data", tmp_path / "data/cache/versions/1"
    with sole_owner(data):
        cached.mkdir(parents=True)
        (cached / "adapter.safetensors").write_bytes(b"of the first")
        before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
        status, out, err = run("serve", "--backend", "fake", "--port", "0")
        assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert (status, out) == (2, "")
    assert f"another server has the data folder {data}" in err
    with sole_owner(tmp_path / "data"):  # free again
        pass


def test_the_address_shown_is_one_that_a_client_can_use():
    with listen(config.Config(host="0.0.0.0", port=0)) as bound:
        assert base_url(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"


class TestKeys:
    def test_a_key_is_shown_once_and_then_listed_without_it(self, run):
        _, added, _ = run("keys", "add", "ada")
        _, listed, _ = run("keys", "list")
        key = added.removeprefix("export TINKER_API_KEY=").strip()
        assert key.startswith("tml-")
        assert re.fullmatch(r"key-\S+  \d{4}-\d\d-\d\d \d\d:\d\d UTC  ada  user\n", listed)
        assert key not in listed

    def test_a_revoked_key_is_gone(self, run):
        run("keys", "add")
        _, listed, _ = run("keys", "list")
        assert run("keys", "revoke", listed.split()[0])[0] == 0
        assert run("keys", "list") == (0, "", "")

    @pytest.mark.parametrize("command", ["revoke", "set"])
    def test_changing_what_is_not_there_fails(self, run, command):
        status, _, err = run("keys", command, "key-0")
        assert status == 1
        assert "key-0" in err

    def test_roles_and_quotas_are_set_shown_and_taken_away(self, run):
        run("keys", "add", "ada", "--role", "read-only", "--quota", "models=2", "--name", "n")
        _, listed, _ = run("keys", "list")
        assert listed.split("UTC")[1] == "  ada  read-only  models=2  n\n"
        _, changed, _ = run("keys", "set", listed.split()[0], "--quota", "memory_bytes=2GiB")
        assert changed.split("UTC")[1] == "  ada  read-only  models=2  memory_bytes=2147483648  n\n"
        run("keys", "set", listed.split()[0], "--role", "admin", "--quota", "models=none")
        _, listed, _ = run("keys", "list")
        assert listed.split("UTC")[1] == "  ada  admin  memory_bytes=2147483648  n\n"

    @pytest.mark.parametrize(
        "quota", ["models=-1", "models=1e5", "models=many", "models", "llamas=3"]
    )
    def test_a_quota_that_is_none_is_refused(self, run, quota):
        status, _, err = run("keys", "add", "ada", "--quota", quota)
        assert status == 2
        assert quota.partition("=")[0] in err
        assert run("keys", "list") == (0, "", "")


class TestModels:
    def test_lists_what_would_be_served(self, run, smollm2_gguf):
        status, out, _ = run("models", "--dtype", "float32", "--model", f"a/b={smollm2_gguf}")
        assert status == 0
        expected = ["a/b", "llama", "135M", "8192", "float32", str(smollm2_gguf)]
        assert out.splitlines()[1].split() == expected

    def test_lists_an_alias_with_what_it_stands_for(self, run, smollm2_gguf):
        model = f"a/b={smollm2_gguf}"
        status, out, _ = run("models", "--model", model, "--alias", "Qwen/Qwen3-8B=a/b")
        served, alias = (line.split() for line in out.splitlines()[1:])
        assert status == 0
        assert alias == ["Qwen/Qwen3-8B", *served[1:]]
        status, _, err = run("models", "--model", model, "--alias", "x/y=c/d")
        assert status == 2
        assert "'c/d', which is not served" in err

    def test_says_how_to_get_the_default_model(self, run):
        status, _, err = run("models")
        assert status == 2
        assert "tinkercloud fetch smollm2" in err

    def test_a_path_that_is_not_there_is_one_line(self, run, tmp_path):
        status, _, err = run("models", "--model", f"a/b={tmp_path / 'nothing'}")
        assert status == 2
        assert err.count("\n") == 1
        assert str(tmp_path / "nothing") in err


def test_the_default_model_is_the_one_that_was_fetched(tmp_path, smollm2_gguf):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2_gguf.name).symlink_to(smollm2_gguf)
    served = options.with_models(config.Config(data_dir=tmp_path)).models
    name = fetch.packaged("smollm2").serve_as
    assert [(model.name, model.path.name) for model in served] == [(name, smollm2_gguf.name)]


def test_a_packaged_models_name_is_checked(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fetch", "smollm9"])
    assert stopped.value.code == 2
    assert "smollm2" in capsys.readouterr().err


class TestServe:
    @pytest.fixture
    def server(self, tmp_path):
        with start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
            yield server

    def test_the_printed_key_opens_the_door(self, fake_server):
        with fake_server.http() as http:
            assert http.get("/api/v1/get_server_capabilities").status_code == 200

    def test_no_key_opens_nothing(self, fake_server):
        with fake_server.http(authenticated=False) as http:
            assert http.get("/api/v1/get_server_capabilities").status_code == 401

    def test_a_later_start_shows_no_key_and_takes_the_first_one(self, server):
        first = server.api_key
        server.restart()
        assert "tml-" not in server.output()
        assert "tinkercloud keys add" in server.output()
        with server.http() as http:
            assert server.api_key == first
            assert http.get("/api/v1/get_server_capabilities").status_code == 200

    def test_a_small_answer_does_not_wait_for_an_acknowledgement(self, fake_server):
        times_s = []
        with fake_server.http() as http:
            for _ in range(40):
                began = time.perf_counter()
                http.get("/api/v1/healthz")
                times_s.append(time.perf_counter() - began)
        assert min(times_s[5:]) < 0.035  # delayed acknowledgements would make each one 0.04

    def test_the_data_directory_holds_no_key_in_clear(self, fake_server):
        stored = [path for path in fake_server.data_dir.rglob("*") if path.is_file()]
        assert stored
        assert not [path for path in stored if fake_server.api_key.encode() in path.read_bytes()]

    def test_the_log_shows_the_key_only_where_it_is_introduced(self, fake_server):
        with fake_server.http() as http:
            http.get("/api/v1/get_server_capabilities")
            http.get("/api/v1/no/such/page")
        assert fake_server.output().count(fake_server.api_key) == 1

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_with_status_0(self, server, how):
        assert server.stop(how) == 0
        assert "Traceback" not in server.output()

    def test_without_authentication_any_key_does(self, tmp_path):
        with (
            start_server("--backend", "fake", "--no-auth", data_dir=tmp_path / "open") as server,
            server.http(authenticated=False) as http,
        ):
            assert http.get("/api/v1/get_server_capabilities").status_code == 200

    def test_a_backend_that_cannot_start_is_one_line_and_status_2(self, tmp_path):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"not a model")
        server = Server(("--model", f"a/b={broken}"), tmp_path / "data")
        with pytest.raises(ServerDidNotStart) as refused:
            server.start()
        assert str(refused.value).startswith("exit status 2")
        assert "Traceback" not in server.output()
        assert "broken.gguf" in server.output().splitlines()[-1]

    def test_a_draft_head_that_is_not_there_is_said_at_the_start_with_the_command_to_run(
        self, tmp_path
    ):
        model = write_tiny_model(tmp_path)
        server = Server(("--model", f"a/b={model}", "--speculate", "head"), tmp_path / "data")
        with pytest.raises(ServerDidNotStart) as refused:
            server.start()
        assert str(refused.value).startswith("exit status 2")
        command = f"tinkercloud draft train --model a/b={model} --data-dir {tmp_path / 'data'}"
        assert f"`{command}`" in server.output().splitlines()[-1]

    def test_weights_that_cannot_be_loaded_end_it_before_a_first_key_is_shown(self, tmp_path):
        server = Server(("--model", f"a/b={_unloadable(tmp_path)}"), tmp_path / "data")
        with pytest.raises(ServerDidNotStart) as refused:
            server.start()
        assert str(refused.value).startswith("exit status 2")
        assert "while loading its model" in server.output().splitlines()[-1]
        assert "TINKER_API_KEY" not in server.output()

    def test_weights_that_cannot_be_loaded_end_a_server_that_accepts_work(self, tmp_path):
        arguments = ("--model", f"a/b={_unloadable(tmp_path)}", "--no-auth")
        server = Server(arguments, tmp_path / "data")
        server.start()
        assert server.process.wait(START_LIMIT_S) == 2
        assert "while loading its model" in server.output().splitlines()[-1]


def _unloadable(folder: Path) -> Path:
    """A model whose fault only shows when it is loaded."""
    model = write_tiny_model(folder / "model")
    (model / "tokenizer.json").write_text("{}")
    return model


def hold_a_poll(server: Server, started: threading.Event) -> None:
    """Ask for the result of an operation whose predecessor never comes."""
    with server.http(timeout_s=600.0) as http:
        session = http.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/tiny"}
        model = http.post("/api/v1/create_model", json={**body, "lora_config": {"rank": 4}}).json()
        http.post("/api/v1/retrieve_future", json={"request_id": model["request_id"]})
        ahead = {
            "model_id": f"{session}:train:0",
            "seq_id": 9,
            "forward_backward_input": {
                "data": [
                    {
                        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                        "loss_fn_inputs": {
                            "target_tokens": {"data": [2], "dtype": "int64"},
                            "weights": {"data": [1.0], "dtype": "float32"},
                        },
                    }
                ],
                "loss_fn": "cross_entropy",
            },
        }
        waiting = http.post("/api/v1/forward_backward", json=ahead).json()["request_id"]
        started.set()
        try:
            http.post("/api/v1/retrieve_future", json={"request_id": waiting})
        except httpx.HTTPError:
            return  # the server went away, as it should


def test_ctrl_c_ends_it_within_seconds_while_a_poll_is_held(tmp_path):
    waits = ("--gap-grace-s", "600", "--hold-s", "400", "--drain-s", "400")
    arguments = ("--backend", "fake", *waits)
    with start_server(*arguments, data_dir=tmp_path / "data") as server:
        started = threading.Event()
        client = threading.Thread(target=hold_a_poll, args=(server, started))
        client.start()
        assert started.wait(START_LIMIT_S)
        time.sleep(0.3)  # the poll itself must have arrived
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < 60  # of a busy machine, and far less than it might wait
        client.join()
        assert "Traceback" not in server.output()


def test_plan_prints_sizes_memory_and_reasons(run):
    config_file = str(ROOT / "tests/planning/configs/Llama-3.1-8B.json")
    status, out, err = run("plan", config_file, "--gpus", "8", "--tp", "2")
    assert (status, err) == (0, "")
    for part in ("8.03B parameters", "tp 2, pp 1", "training", "sync", "sampling", "as asked for"):
        assert part in out


def test_plan_speaks_json_to_programs(run, tmp_path):
    source = ROOT / "tests/planning/configs/Qwen3-0.6B.json"
    (tmp_path / "config.json").write_bytes(source.read_bytes())
    status, out, _ = run("plan", str(tmp_path), "--gpus", "1", "--full", "--json")
    assert status == 0
    assert json.loads(out)["parameters"] == 596_049_920
    assert json.loads(out)["lora_rank"] is None


def test_plan_tells_every_reason_of_a_refusal(run):
    config_file = str(ROOT / "tests/planning/configs/gpt-oss-20b.json")
    status, out, err = run("plan", config_file, "--gpus", "8")
    assert (status, out) == (2, "")
    assert [line[:30] for line in err.splitlines()] == ["tinkercloud: GptOssForCausalLM"] * 2


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000])
def test_plan_refuses_a_file_that_is_no_config(run, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    status, _, err = run("plan", str(tmp_path), "--gpus", "8")
    assert status == 2
    assert err.startswith("tinkercloud: ")
    assert err.count("\n") == 1


def test_plan_refuses_what_is_neither_folder_nor_config(run):
    status, _, err = run("plan", "model.gguf", "--gpus", "8")
    assert (status, "neither a folder" in err) == (2, True)


def test_a_draft_that_is_not_there_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data-dir", str(tmp_path), "--model", f"m={tmp_path}"]
    assert cli.main(["draft", "use", "nothing", *options]) == 1
    assert "there is no draft 'nothing'" in capsys.readouterr().err
    assert cli.main(["draft", "rollback", *options]) == 1
    assert cli.main(["draft", "status", *options]) == 0
    assert "draft train" in capsys.readouterr().out


def test_speculation_off_has_nothing_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data-dir", str(tmp_path), "--model", f"m={tmp_path}"]
    assert cli.main(["bench", "speculation", "--speculate", "off", *options]) == 2
    assert "name a drafter" in capsys.readouterr().err
    assert cli.main(["serve", "--speculate", "cleverly", *options]) == 2
    assert "auto, off, suffix, head, model:PATH" in capsys.readouterr().err
