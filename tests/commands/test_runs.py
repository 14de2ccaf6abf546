"""`tinkercloud replay` and `branch`, on the data folder of a server that runs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving, wire_datum
from tests.api.recovery.test_recovery import ADAM, goes_on, train
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.cli import main
from tinkercloud.services.recovery import run_archive, snapshots


async def command(folder: Path, *arguments: str) -> int:
    full = [*arguments, "--data-dir", str(folder)]
    if arguments[0] != "diff":
        full += ["--backend", "fake"]
    return await asyncio.to_thread(main, full)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after each operation, all of them kept."""
    monkeypatch.setattr(snapshots, "SHARE", 1e9)
    monkeypatch.setattr(run_archive, "SNAPSHOT_EVERY_S", 0.0)


async def test_a_run_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        await train(api, model_id, 1, steps=3)
        assert await command(tmp_path, "replay", model_id) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"operations 1 to 10 of the run {model_id} are kept, steps 1 to 3"
        assert lines[1].startswith("step 1: all 4 operations")
        assert lines[-1] == "all 10 operations gave the bits on record"
        assert await command(tmp_path, "replay", model_id, "--step", "2") == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("all 7 operations")
        assert await command(tmp_path, "replay", model_id, "--list") == 0
        assert len(capsys.readouterr().out.splitlines()) == 1
        assert await command(tmp_path, "replay", model_id, "--step", "4") == 1
        assert "step 4 is not kept" in capsys.readouterr().err
        assert await command(tmp_path, "replay", "nobody") == 1
        assert model_id in capsys.readouterr().err


@pytest.mark.usefixtures("often")
async def test_a_replay_begins_at_a_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        await api.services.snapshots.settled()
        await api.services.snapshots.take(("ann", model_id), number)
        await api.services.snapshots.settled()
        await train(api, model_id, number, steps=1)
        assert await command(tmp_path, "replay", model_id, "--step", "2", "--nearest") == 0
        assert int(capsys.readouterr().out.splitlines()[-1].split()[1]) <= 3


async def altered(api: Api, kind: str) -> None:
    await api.services.database.write(
        "UPDATE operations SET digest = x'00' WHERE kind = ? AND position > 4", kind
    )


async def test_other_bits_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        await train(api, model_id, 1, steps=2)
        await altered(api, "ForwardBackward")
        assert await command(tmp_path, "replay", model_id) == 1
        out = capsys.readouterr().out
        assert "operation 5 (ForwardBackward): other bits" in out
        assert "2 of 7 operations gave other bits; largest difference of a log" in out


async def test_another_class_of_numerics_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        await train(api, model_id, 1, steps=1)
        await altered(api, "OptimStep")
        await api.services.database.write("UPDATE operations SET digest = x'00'")
        monkeypatch.setattr(FakeBackend, "numerics", lambda self: "another machine")
        assert await command(tmp_path, "replay", model_id) == 1
        assert "cannot check bits: another class" in capsys.readouterr().out


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.usefixtures("often")
async def test_a_branch_goes_on_as_the_run_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_cut: bool
) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=2)
        expected: list[Any] = await goes_on(api, model_id, number)
        await api.services.snapshots.settled()
        if is_cut:
            await api.services.database.write("UPDATE operations SET ran_at = 0")
            await api.services.database.write(
                "UPDATE operations SET ran_at = 9e9 WHERE position > 6"
            )
            await api.services.archive.expire()
        assert await command(tmp_path, "branch", model_id, "--step", "2") == 0
        path = capsys.readouterr().out.strip()
        assert path.endswith("/weights/step-2")
        assert not path.startswith(f"tinker://{model_id}/")
        session = await api.session()
        created = await api.ok(
            "load_weights", session_id=session, model_seq_id=0, path=path, optimizer=True
        )
        branch = (await api.result(created))["model_id"]
        assert await goes_on(api, branch, 1) == expected


async def a_run(api: Api, *, steps: int = 2, **adam: float) -> str:
    model_id = await api.model(lora_config={"rank": 4, "seed": 7})
    # Where each operation has a snapshot, so has the first pass: none is being written then.
    await api.services.snapshots.settled()
    number = await train(api, model_id, 1, steps=steps)
    await api.result(await api.forward_backward(model_id, number, [wire_datum((9, 8, 7))]))
    await api.result(await api.optim_step(model_id, number + 1, **{**ADAM, **adam}))
    return model_id


async def test_runs_that_are_the_same_have_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations and saves between operations change nothing, and are no difference."""
    async with serving(tmp_path) as api:
        one, other = await a_run(api), await api.model(lora_config={"rank": 4, "seed": 7})
        await api.result(await api.forward_backward(other, 1, forward_only=True))
        await train(api, other, 2, steps=2)
        assert await command(tmp_path, "diff", one, other) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == "from step 1 on, 7 operations are the same"
        assert lines[-2].endswith("ends there")
        assert await command(tmp_path, "diff", one, await a_run(api)) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "no operation differs"


@pytest.mark.parametrize(
    ("adam", "words"),
    [
        ({"beta1": 0.5}, "adam_params.beta1 is 0.9 and 0.5"),
        ({}, "datum 0: tokens of shape [3] and [4]"),
    ],
)
async def test_the_first_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adam: dict[str, float], words: str
) -> None:
    async with serving(tmp_path) as api:
        one = await a_run(api)
        other = await a_run(api, **adam) if adam else await a_run(api, steps=3)
        assert await command(tmp_path, "diff", one, other) == 1
        lines = capsys.readouterr().out.splitlines()
        assert words in lines[-1]
        assert lines[-2].endswith("step 3")


async def test_a_run_that_was_cut_is_compared_from_where_both_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], often: None
) -> None:
    async with serving(tmp_path) as api:
        one, other = await a_run(api, steps=4), await a_run(api, steps=4, learning_rate=0.5)
        await api.services.snapshots.settled()
        await api.services.database.write(
            "UPDATE operations SET ran_at = 0 WHERE model_id = ? AND position < 7", one
        )
        await api.services.archive.expire()
        assert await command(tmp_path, "diff", one, other) == 1
        lines = capsys.readouterr().out.splitlines()
        assert "from step 1 on" not in lines[2]
        assert "learning_rate is 0.05 and 0.5" in lines[-1]


async def test_the_same_request_with_another_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as api:
        one, other = await a_run(api), await a_run(api)
        await api.services.database.write(
            "UPDATE operations SET digest = x'00' WHERE model_id = ? AND position = 3", other
        )
        assert await command(tmp_path, "diff", one, other) == 1
        assert "the result is another" in capsys.readouterr().out
