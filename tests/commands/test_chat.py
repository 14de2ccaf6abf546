"""`tinkercloud chat` and `tinkercloud generate` against a real server on the backend `fake`."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import tinker

from tests import serving
from tests.chat.model_folder import write_model_folder
from tinkercloud.cli import main
from tinkercloud.commands.generation.api_client import Answer, shown
from tinkercloud.commands.generation.draft_counts import DraftCounts

MODEL = "chatty"
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    """With a model that has a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    source = write_model_folder(folder / "model")
    flags = ("--backend", "fake", "--model", f"{MODEL}={source}")
    with serving.start_server(*flags, data_dir=folder / "data") as server:
        yield server


@pytest.fixture
def tinkercloud(
    server: serving.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command in this process, which saves the start of another."""
    for name, value in server.sdk_environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = main(arguments)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


SHORT = ("--model", MODEL, "--max-tokens", "12", "--seed", "3")


def test_a_text_is_continued_and_its_numbers_are_beside_it(
    server: serving.Server, tinkercloud: Command
) -> None:
    run = subprocess.run(  # as it is typed
        [sys.executable, "-m", "tinkercloud", "generate", "-", "--stats", *SHORT],
        cwd=serving.ROOT,
        env=server.sdk_environment,
        input="Count the owners",
        capture_output=True,
        text=True,
        timeout=300,
    )
    again = tinkercloud("generate", "Count the owners", *SHORT)
    assert run.returncode == again.returncode == 0, run.stderr
    assert run.stdout == again.stdout
    assert len(run.stdout) > 1
    assert "tokens in" in run.stderr
    assert again.stderr == ""


def test_who_gives_no_key_is_told_how(
    server: serving.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    for more in ((), ("--model", MODEL)):
        assert main(["generate", "Hello", "--url", server.base_url, *more]) == 1
        error = capsys.readouterr().err
        assert error.strip().endswith("give an API key by TINKER_API_KEY or --key")


def test_a_message_is_answered_where_a_text_would_be_continued(tinkercloud: Command) -> None:
    answered = tinkercloud("generate", "Hello", "--chat", *SHORT)
    continued = tinkercloud("generate", "Hello", *SHORT)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout != continued.stdout


def test_a_checkpoint_talks_beside_its_base(tinkercloud: Command) -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(MODEL, rank=4).result()
    every = list(range(256))  # whatever came before, the same token follows
    inputs = {"target_tokens": [70] * 256, "weights": [1.0] * 256}
    model_input = tinker.ModelInput.from_ints(every)
    datum = tinker.Datum(model_input=model_input, loss_fn_inputs=inputs)
    for _ in range(5):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1.0)).result()
    path = training.save_weights_for_sampler("talks").result().path
    service.close("success").result()
    typed = f"Hello\n/model {path}\n/clear\nHello\n/models\n"
    run = tinkercloud("chat", *SHORT, typed=typed)
    assert run.returncode == 0, run.stderr
    base, after = run.stdout.split(f"[{path}]", 1)
    assert base.startswith(f"[{MODEL}; /help]\n")
    assert path in after.split("[cleared]", 1)[1]  # listed
    answer = base.split("\n", 1)[1].strip()
    assert answer
    assert answer not in after


def test_a_talk_counts_its_answers_compares_them_and_forgets(tinkercloud: Command) -> None:
    typed = "/stats\n/eval\n/train\nHello\n/stats\n/eval\n/nonsense\n"
    typed += "/model no/such\nHello\n/quit\nunread\n"
    run = tinkercloud("chat", "--system", "Be brief.", *SHORT, typed=typed)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "this backend trains no drafts" in lines[3]
    assert lines[:3] == [
        f"[{MODEL}; /help]",
        "[no answer yet]",
        "[there is no answer yet to evaluate drafts by]",
    ]
    assert "[1 answers, " in run.stdout
    assert "[with drafts: 12 tokens in" in run.stdout
    assert "[without: 12 tokens in" in run.stdout
    assert "[the same text; " in run.stdout
    assert "[/nonsense is no command]" in run.stdout
    assert "no/such" in lines[-1]  # what the server refuses does not end the talk
    assert "unread" not in run.stdout


def test_a_server_that_is_not_there_and_a_key_that_is_refused_are_sentences(
    server: serving.Server, tinkercloud: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    unnamed = tinkercloud("generate", "x", "--max-tokens", "1")
    assert "this model has no tokenizer" in unnamed.stderr  # the first that is served
    assert main(["generate", "x", "--url", server.base_url, "--key", "tml-no"]) == 1
    assert "key" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1", "--key", "tml-no"]) == 1
    assert "http://127.0.0.1:1: " in capsys.readouterr().err


def test_a_model_cannot_steer_the_terminal() -> None:
    assert shown("a\x1b[31mb\x07\r\n\tc\x9b") == "a�[31mb��\n\tc�"


def test_drafts_are_counted_between_two_readings_and_speed_after_the_first_token() -> None:
    assert DraftCounts(30, 20).since(DraftCounts(10, 5)).line == (
        "75% of 20 drafted tokens accepted"
    )
    assert DraftCounts(3, 3).since(DraftCounts(3, 3)).line == "no drafts"
    assert Answer(num_tokens=11, first_s=1.0, all_s=3.0).tokens_per_s == 5.0
    assert Answer(num_tokens=1, first_s=1.0, all_s=1.0).tokens_per_s == 0.0
