"""`/train` of `tinkercloud chat`, as it is typed, against a server whose draft head learns."""

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.embedded.draft_training.test_online_trainer import publish_untrained
from tests.embedded.tiny import write_tiny_model
from tests.serving import Server, start_server
from tinkercloud.cli import main
from tinkercloud.embedded.draft_training.files import drafts_of
from tinkercloud.embedded.forward import runners
from tinkercloud.speculative.learning.schedule import TRAINING_IS_OVER

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
MODEL = "tiny"
Talk = Callable[..., list[str]]
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
RATE, BURSTING_RATE = 3e-3, 1e30  # at one a head learns, at the other its weights overflow
ANSWERS = [f"{name}\n/clear" for name in "abcdefgh"]  # of one seed, so by different prompts
ASKED = "[the draft is trained once the server has nothing else to do]"
TRAINED = re.compile(
    r"\[\d+ steps: \d\.\d\d tokens of a draft are expected to be accepted, before \d\.\d\d; "
    r"(it is drafted with|not used)\]"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=[RATE])
def server(
    chatty: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Its draft learns at that rate, and only where somebody asks."""
    data_dir = tmp_path_factory.mktemp("server") / "data"
    publish_untrained(chatty, data_dir / "drafts")
    flags = ("--backend", "embedded", "--model", f"{MODEL}={chatty}", "--speculate", "head")
    flags += ("--engine-threads", "1", "--draft-rate", str(request.param))
    flags += ("--draft-least-cases", str(10**9))
    with start_server(*flags, data_dir=data_dir) as server:
        yield server


@pytest.fixture
def talk(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Talk:
    """What came after the last answer, line by line."""

    def talked(*lines: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        address = ["--url", server.base_url, "--key", server.api_key]
        assert main(["chat", "--max-tokens", "40", "--seed", "3", *address]) == 0
        return capsys.readouterr().out.rpartition("[cleared]\n")[2].splitlines()

    return talked


def test_a_draft_learns_from_what_was_said_once_there_is_enough_of_it(talk: Talk) -> None:
    assert talk(ANSWERS[0], "/train") == [
        ASKED,
        "[too little was sampled yet for it to learn from; talk on, and ask again]",
    ]
    asked, outcome = talk(*ANSWERS, "/train")
    assert asked == ASKED
    assert TRAINED.fullmatch(outcome)


def test_who_waits_for_a_training_that_cannot_be_kept_is_told_that_none_goes_on(
    server: Server, talk: Talk
) -> None:
    latest = drafts_of(server.data_dir / "drafts", MODEL).root / "latest"
    latest.unlink()
    (latest / "in the way").mkdir(parents=True)
    asked, outcome, refused = talk(*ANSWERS, "/train", "/train")
    assert (asked, outcome) == (ASKED, f"[{TRAINING_IS_OVER}]")
    assert refused == f"[{server.base_url}: {TRAINING_IS_OVER}]"


@pytest.mark.parametrize("server", [BURSTING_RATE], indirect=True)
def test_a_training_that_breaks_off_is_told(server: Server, talk: Talk) -> None:
    assert talk(*ANSWERS, "/train") == [
        ASKED,
        "[the training broke off, and the draft is as before; the server's log says why]",
    ]
    assert "training of the draft was given up: " in server.output()
