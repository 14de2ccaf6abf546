"""`tinkercloud receipt` and `verify`: a stranger computes again what a server gave."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving, wire_datum
from tests.api.recovery.test_recovery import train
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.cli import main
from tinkercloud.commands.runs.receipt import NOT_NUMBERED

Output = pytest.CaptureFixture[str]
LONG = {"max_tokens": 12, "temperature": 1.0, "seed": 1}


async def command(*arguments: object) -> int:
    full = [*(str(each) for each in arguments), "--backend", "fake"]
    return await asyncio.to_thread(main, full)


async def sampler_of(api: Api, kind: str) -> str:
    if kind == "base":
        return await api.sampler(await api.session())
    model_id = await api.model()
    number = await train(api, model_id, 1)
    save = {"model_id": model_id, "seq_id": number}
    if kind == "checkpoint":
        saved = await api.result(await api.ok("save_weights_for_sampler", **save, path="one"))
        return await api.sampler(await api.session(), model_path=saved["path"], base_model=None)
    save |= {"sampling_session_seq_id": 9}
    published = await api.result(await api.ok("save_weights_for_sampler", **save))
    await train(api, model_id, number + 1)  # the model goes on
    return published["sampling_session_id"]


@pytest.mark.parametrize("kind", ["base", "checkpoint", "ephemeral"])
async def test_a_sample_is_verified_elsewhere(tmp_path: Path, capsys: Output, kind: str) -> None:
    data, weights, path = tmp_path / "data", tmp_path / "weights", tmp_path / "receipt.json"
    async with serving(data) as api:
        sampler = await sampler_of(api, kind)
        await api.result(await api.sample(sampler, num_samples=2, seq_id=4))
        asked = ["receipt", sampler, "--sample", 4, "--data-dir", data, "--weights", weights]
        assert await command(*asked) == 0
    path.write_text(capsys.readouterr().out)
    elsewhere = ["verify", path, "--data-dir", tmp_path / "elsewhere"]
    if kind != "base":
        assert weights.is_dir()
        assert await command(*elsewhere) == 1
        assert "name its folder with --weights" in capsys.readouterr().err
        elsewhere += ["--weights", weights]
    assert await command(*elsewhere) == 0
    assert capsys.readouterr().out.startswith("verified: ")


async def test_samples_of_an_inflight_sampler_have_the_weights_of_their_time(
    tmp_path: Path, capsys: Output
) -> None:
    """One after each save, and one that may have been drawn from any of them."""
    data = tmp_path / "data"
    async with serving(data) as api:
        model_id, number, sampler = await api.model(), 1, ""
        for save in range(3):
            number = await train(api, model_id, number)
            published = await api.ok(
                "save_weights_for_sampler",
                model_id=model_id,
                seq_id=number,
                sampling_session_seq_id=save,
                kind="inflight",
            )
            sampler = sampler or (await api.result(published))["sampling_session_id"]
            await api.result(published)
            await api.result(await api.sample(sampler, seq_id=save, sampling_params=LONG))
            number += 1
        database = api.services.database
        await database.write("UPDATE futures SET started_at = 0 WHERE kind = 'Sample'")
        ran = await database.all("SELECT ran_at FROM operations ORDER BY position")
        assert len(ran) == 1 + 3 * 7
        weights = []
        for sample in range(3):
            asked = ["receipt", sampler, "--sample", sample, "--data-dir", data]
            place = tmp_path / f"weights-{sample}"
            assert await command(*asked, "--weights", place) == 0
            text = capsys.readouterr().out
            weights.append(json.loads(text)["weights"]["sha256"])
            path = tmp_path / "receipt.json"
            path.write_text(text)
            elsewhere = ["--weights", place, "--data-dir", tmp_path / "elsewhere"]
            assert await command("verify", path, *elsewhere) == 0
            assert capsys.readouterr().out.startswith("verified: ")
    assert len(set(weights)) == 3


async def test_what_is_not_kept_has_no_receipt(tmp_path: Path, capsys: Output) -> None:
    async with serving(tmp_path) as api:
        sampler = await sampler_of(api, "base")
        chat = {"model": sampler, "prompt": [1, 2, 3], "max_tokens": 2}
        headers = {"authorization": f"Bearer {api.key}"}
        answer = await api.http.post("/oai/api/v1/completions", json=chat, headers=headers)
        assert answer.status_code == 200, answer.text
        assert await command("receipt", sampler, "--sample", 0, "--data-dir", tmp_path) == 1
        error = capsys.readouterr().err
        assert "no sample 0" in error
        assert "have no number in a sampling session" in error


def test_the_page_of_operations_says_which_samples_get_no_receipt() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    assert NOT_NUMBERED in " ".join(page.split())


@pytest.mark.parametrize("step", [1, 2])
async def test_a_step_is_verified_elsewhere(tmp_path: Path, capsys: Output, step: int) -> None:
    data, weights, path = tmp_path / "data", tmp_path / "weights", tmp_path / "receipt.json"
    async with serving(data) as api:
        model_id = await api.model()
        await train(api, model_id, 1, steps=3)
        asked = ["receipt", model_id, "--step", step, "--data-dir", data, "--weights", weights]
        assert await command(*asked) == 0
    path.write_text(capsys.readouterr().out)
    # a first step begins with the model's creation, which needs no weights
    assert weights.exists() is (step > 1)
    given = ["--weights", weights] if step > 1 else []
    assert await command("verify", path, *given) == 0
    number = 4 - (step > 1)
    assert f"verified: {number} of {number} operations" in capsys.readouterr().out


async def test_a_step_whose_first_passes_are_not_kept_has_no_receipt(
    tmp_path: Path, capsys: Output
) -> None:
    """A checkpoint has no gradient: what the snapshot has of them could not be checked."""
    data, path = tmp_path / "data", tmp_path / "receipt.json"
    async with serving(data) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        await api.result(await api.forward_backward(model_id, number, [wire_datum((5, 6, 7))]))
        await api.services.snapshots.take(("ann", model_id), 5)
        await api.services.snapshots.settled()
        await train(api, model_id, number + 1, steps=2)
        await api.services.database.write("UPDATE operations SET ran_at = 0 WHERE position <= 5")
        await api.services.archive.expire()
        asked = ["receipt", model_id, "--data-dir", data, "--step"]
        assert await command(*asked, 2) == 1
        error = capsys.readouterr().err
        assert "step 2 gets no receipt" in error
        assert "steps from 3 on are kept whole" in error
        assert await command("replay", model_id, "--step", 2, "--data-dir", data) == 0
        capsys.readouterr()
        assert await command(*asked, 3, "--weights", tmp_path / "weights") == 0
    path.write_text(capsys.readouterr().out)
    assert await command("verify", path, "--weights", tmp_path / "weights") == 0


async def a_receipt(folder: Path, capsys: Output) -> dict[str, Any]:
    async with serving(folder) as api:
        sampler = await api.sampler(await api.session())
        await api.result(await api.sample(sampler, seq_id=0))
        await command("receipt", sampler, "--sample", 0, "--data-dir", folder)
    return json.loads(capsys.readouterr().out)


async def test_a_receipt_that_was_changed_is_refused(tmp_path: Path, capsys: Output) -> None:
    receipt = await a_receipt(tmp_path, capsys)
    path = tmp_path / "receipt.json"
    receipt["result"][0]["tokens"][0] += 1
    path.write_text(json.dumps(receipt))
    assert await command("verify", path) == 1
    assert "result has another hash" in capsys.readouterr().err
    path.write_text("{}")
    assert await command("verify", path) == 1
    assert "no receipt" in capsys.readouterr().err
    assert await command("verify", tmp_path / "none") == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numerics", "words"),
    [(None, "NOT verified"), ("another machine", "cannot check bits: another class of numerics")],
)
async def test_other_bits_are_said_to_be_other(
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    numerics: str | None,
    words: str,
) -> None:
    from tinkercloud.services.runs.receipts import sealed

    receipt = await a_receipt(tmp_path, capsys)
    parts = {name: v for name, v in receipt.items() if name not in ("receipt", "hashes")}
    parts["result"][0]["logprobs"][-1] += 0.25
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(sealed(parts)))
    if numerics is not None:
        monkeypatch.setattr(FakeBackend, "numerics", lambda self: numerics)
    assert await command("verify", path) == 1
    out = capsys.readouterr().out
    assert words in out
    assert "largest difference 0.25 nats" in out
