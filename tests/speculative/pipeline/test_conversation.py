"""Turns of a conversation: what the target says to all that was said; sessions are kept."""

import asyncio
import json
from dataclasses import replace
from operator import not_
from pathlib import Path

import pytest

from tests.chat.model_folder import write_model_folder
from tests.speculative.pipeline.conftest import (
    Workers,
    at,
    wait_for_drafters,
    wait_until_no_session,
)
from tests.speculative.pipeline.scripted import Knowing, ScriptedEngine, plain
from tests.waiting import async_wait_for, wait_for
from tinkercloud.chat.text_model import Conversation, TextModel
from tinkercloud.commands.generation.worker_chat import WorkerChat
from tinkercloud.errors import UserError
from tinkercloud.speculative.pipeline import ConversationSession, Orchestrator, PipelineOptions
from tinkercloud.speculative.remote.target_messages import TargetModel, tokenizer_files

SEED = 4
OPTIONS = PipelineOptions(max_tokens=24, seed=SEED, draft_wait_s=5.0, round_timeout_s=10.0)


def described(folder: Path) -> TargetModel:
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return TargetModel("chatty", b"digest", size, b"", tokenizer_files(folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = write_model_folder(tmp_path_factory.mktemp("model") / "chatty")
    return described(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = write_model_folder(tmp_path_factory.mktemp("model") / "chatty")
    return TextModel.of_folder("chatty", folder)


def assert_said(conversation: ConversationSession, text: TextModel) -> None:
    """Each answer is what the target says to everything before it."""
    said = [*conversation.messages]
    for result in reversed(conversation.results):
        answer = said.pop()
        assert answer == {"role": "assistant", "content": result.text}
        prompt = text.prompt(Conversation(tuple(said)))
        assert list(result.prompt) == prompt
        assert (result.tokens, result.logprobs) == plain(prompt, SEED, 24)
        said.pop()


def test_turns_are_the_target_s_and_share_sessions(
    workers: Workers, model: TargetModel, text: TextModel
) -> None:
    engine, drafter = ScriptedEngine(), Knowing(7)
    target, draft = workers.target(engine, model=model), workers.draft(drafter)
    with Orchestrator(at(target), at(draft), OPTIONS) as pipeline:
        with pipeline.chat_session("Be brief.") as session:
            pieces: list[str] = []
            for message in ("hello", "and now?", "what else?"):
                answer = session.generate(message, pieces.append)
                assert answer == "".join(pieces)
                pieces.clear()
            assert_said(session, text)
            assert session.messages[0] == {"role": "system", "content": "Be brief."}
            assert len(session.messages) == 7
            if all(each.finish_reason == "length" for each in session.results):
                assert drafter.begun == 1
                assert target.worker.stats()["sessions"] == 1
        wait_until_no_session(target)
        session.generate("still there?")  # begins anew, with all that was said
        assert_said(session, text)
        session.end()
    wait_for("no draft is left", lambda: drafter.live, not_)
    wait_until_no_session(target)


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(
    workers: Workers, model: TargetModel, text: TextModel
) -> None:
    target = workers.target(ScriptedEngine(), model=model)
    with Orchestrator(at(target), options=OPTIONS) as pipeline, pipeline.chat_session() as session:
        session.generate("hello")
        before = list(session.messages)
        with pytest.raises(UserError, match="too long"):
            session.generate("x" * 1000)
        assert session.messages == before
        session.generate("hello again")
        assert_said(session, text)


async def test_one_turn_at_a_time_and_a_cancelled_one_leaves_nothing(
    workers: Workers, model: TargetModel, text: TextModel
) -> None:
    engine = ScriptedEngine(is_held=True)
    target = workers.target(engine, model=model)
    async with Orchestrator(at(target), options=OPTIONS) as pipeline:
        session = pipeline.chat_session()
        turn = asyncio.ensure_future(session.generate_async("hello"))
        await async_wait_for("a job runs", lambda: engine.jobs)
        with pytest.raises(UserError, match="a turn already"):
            await session.generate_async("me too")
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        wait_for("no job is left", lambda: engine.jobs, not_)
        wait_until_no_session(target)
        engine.is_held = False
        await session.generate_async("hello")
        assert_said(session, text)
        assert len(session.messages) == 2


def test_a_template_that_writes_answers_otherwise_begins_a_new_session(
    workers: Workers, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content[:3] }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    folder = write_model_folder(tmp_path / "short", template)
    model = described(folder)
    target = workers.target(ScriptedEngine(), model=model)
    options = replace(OPTIONS, max_tokens=9)
    with Orchestrator(at(target), options=options) as pipeline, pipeline.chat_session() as session:
        for message in ("hello", "and now?"):
            session.generate(message)
        for result in session.results:
            assert result.tokens == plain(list(result.prompt), SEED, 9)[0]
        assert target.worker.stats()["sessions"] == 1


def test_a_talk_writes_its_last_answer_again_with_drafts_and_without(
    workers: Workers, model: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = workers.target(ScriptedEngine(), model=model), workers.draft(Knowing())
    with Orchestrator(at(target), at(draft), replace(OPTIONS, seed=None)) as pipeline:
        wait_for_drafters(pipeline)
        chat = WorkerChat(pipeline, pipeline.chat_session(), None, None)
        with chat:
            for line in ("/eval\n", "hello\n", "/eval\n", "/train\n"):
                assert chat.handle(line)
        answer, drafted, plain = pipeline.results
    said = capsys.readouterr().out
    assert "[there is no answer yet to evaluate drafts by]" in said
    assert answer.tokens == drafted.tokens == plain.tokens
    assert drafted.acceptance > 0
    assert [each.nodes for each in plain.rounds] == [0] * len(plain.rounds)
    assert f"[with drafts: {len(answer.tokens)} tokens" in said
    assert "[the same text; " in said
    assert "--draft-remote-model" in said
