"""`tinkercloud proxy` before a server with its defaults and real weights, by OpenAI's client."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import serving
from tests.e2e.clients import MODEL
from tests.proxy.tasks import TASKS, text_of
from tests.serving import Server
from tests.waiting import wait_for_line

LIMIT_S = 300.0
KEY = "the-proxy-s-key"
LIST = "Write the numbers from 1 to 20, one on each line."
GREEDY = {"temperature": 0, "max_tokens": 48}
DRAWN = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 32}


@contextmanager
def proxy(folder: Path, *arguments: str) -> Iterator[tuple[str, Path]]:
    """Its base URL and its log."""
    log = folder / "proxy.log"
    words = ("proxy", "--listen", "127.0.0.1:0", *arguments)
    with serving.command(*words, log=log) as process:
        yield wait_for_line(r"^ready: (\S+)", log, process)[1], log


def chat(client: openai.OpenAI, **fields: Any) -> tuple[str | None, Any]:
    """Text and usage."""
    messages: Any = [{"role": "user", "content": LIST}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, **fields)
    usage = answer.usage
    assert usage is not None
    return answer.choices[0].message.content, (usage.prompt_tokens, usage.completion_tokens)


def streamed(client: openai.OpenAI, **fields: Any) -> str:
    messages: Any = [{"role": "user", "content": LIST}]
    chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **fields)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.slow
def test_answers_are_the_target_s_with_drafts_of_servers_and_of_the_text(
    server: Server, smollm2_folder: Path, tmp_path: Path
) -> None:
    """A drafter that is not there changes nothing. Which drafts are worth a verification depends on
    this machine, and is tested on a clock of its own (tests/proxy/test_draft_length.py)."""
    target = f"{server.base_url}/oai/api/v1"
    (tmp_path / "server.key").write_text(server.api_key)
    (tmp_path / "proxy.key").write_text(KEY)
    keys = [f"--{name}-key-file={tmp_path}/server.key" for name in ("target", "draft")]
    drafts = [f"--draft={one}" for one in (target, "suffix", "http://127.0.0.1:9/v1")]
    tokenizer = f"--tokenizer={smollm2_folder}"
    flags = [*keys, *drafts, tokenizer, f"--target={target}", "--allow-private"]
    flags += ["--draft-timeout-s=60"]  # a busy machine's drafts are late, and taken
    with proxy(tmp_path, *flags, f"--key-file={tmp_path}/proxy.key") as (url, log):
        alone = openai.OpenAI(base_url=target, api_key=server.api_key)
        through = openai.OpenAI(base_url=url, api_key=KEY)
        for fields in (GREEDY, DRAWN, GREEDY | {"stop": "7"}):
            text, usage = chat(alone, **fields)
            assert chat(through, **fields) == (text, usage)
            assert streamed(through, **fields) == text
        continued = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,"}
        completions = [
            client.completions.create(**continued, **GREEDY).choices[0].text
            for client in (alone, through)
        ]
        assert completions[0] == completions[1]
        status = httpx.get(
            url.replace("/v1", "/status"), headers={"authorization": f"Bearer {KEY}"}
        ).json()
        with pytest.raises(openai.AuthenticationError):
            chat(openai.OpenAI(base_url=url, api_key="another"), **GREEDY)
    assert status["requests"]["speculated"] == 7
    assert status["speculation"]["verified_by"] == "tinkercloud"
    by_name = {one["name"]: one for one in status["drafters"]}
    assert by_name[target]["taken"] > 0
    assert not by_name["http://127.0.0.1:9/v1"]["up"]
    assert f"drafts from {target}, by tokens" in log.read_text()
    assert KEY not in log.read_text()


@pytest.fixture
def undrafted(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Server]:
    """It drafts nothing itself, so that the proxy's drafts are worth a verification."""
    flags = ("--model", f"{MODEL}={smollm2_gguf}", "--speculate", "off")
    with serving.start_server(*flags, data_dir=tmp_path / "data") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_tasks_are_answered_as_the_target_answers_them_alone(
    request: pytest.FixtureRequest, smollm2_folder: Path, tmp_path: Path, drafts: bool
) -> None:
    """Arithmetic, JSON, code and prose, as completions and as chats: the same text and usage.
    drafts: whether the target drafts itself, as it does by default."""
    server: Server = request.getfixturevalue("server" if drafts else "undrafted")
    target = f"{server.base_url}/oai/api/v1"
    (tmp_path / "server.key").write_text(server.api_key)
    keys = [f"--{name}-key-file={tmp_path}/server.key" for name in ("target", "draft")]
    flags = [*keys, "--draft=suffix", f"--tokenizer={smollm2_folder}", f"--target={target}"]
    headers = {"authorization": f"Bearer {server.api_key}"}
    with (
        proxy(tmp_path, *flags, "--allow-private") as (url, _),
        httpx.Client(headers=headers, timeout=120.0, trust_env=False) as http,
    ):

        def answer(base_url: str, path: str, body: dict[str, Any]) -> tuple[str, Any, Any]:
            answer = http.post(f"{base_url}/{path}", json={"model": MODEL, **body})
            found = answer.raise_for_status().json()
            num_tokens = [found["usage"][f"{part}_tokens"] for part in ("prompt", "completion")]
            return text_of(found), found["choices"][0]["finish_reason"], num_tokens

        for name, (path, body) in TASKS.items():
            for sampling in (GREEDY, DRAWN):
                alone = answer(target, path, body | sampling)
                assert len(alone[0]) > 1, name
                assert answer(url, path, body | sampling) == alone, (name, sampling)
        status = http.get(url.replace("/v1", "/status")).json()
    assert status["requests"]["speculated"] == 2 * len(TASKS)
    if not drafts:
        assert status["speculation"]["accepted"] > len(TASKS)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--target", "http://127.0.0.1:9/v1"), "private address"),
        (("--target", "http://127.0.0.1:9/v1", "--allow-private"), "target cannot be used"),
        (("--target", "nowhere"), "base URL"),
        (("--target", "http://a/v1", "--listen", "0.0.0.0:0"), "without a key"),
        (("--target", "http://a/v1", "--key-file", "absent"), "cannot read the key"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(arguments: Sequence[str], what: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tinkercloud", "proxy", "--listen", "127.0.0.1:0", *arguments],
        cwd=serving.ROOT, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert what in run.stderr
