"""Our recipes that begin with the base model, as commands against a real server on SmolLM2."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.own_recipes import SDKS, figures, is_picture, recipe, steps_of
from tests.serving import ROOT, Server

IMPORTING = {**os.environ, "PYTHONPATH": f"{ROOT / 'cookbook'}:{ROOT}"}
QUICK_DPO = ("--pairs", "3", "--held-out", "2", "--save-every", "1")


@pytest.fixture(scope="module")
def dpo(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three steps in two goes left their results."""
    folder = tmp_path_factory.mktemp("dpo")
    for steps in ("2", "3"):
        said = recipe(server, "dpo", "--steps", steps, *QUICK_DPO, "--out", str(folder))
    assert "going on behind step 2" in said
    return folder


@pytest.mark.slow
def test_preferences_are_learned(dpo: Path):
    values = figures(dpo, "dpo")["values"]
    assert values[0] == pytest.approx(np.log(2), abs=1e-6), "nothing is preferred yet"
    assert values[-1] < 0.5
    assert [step["step"] for step in steps_of(dpo, "dpo")] == [1, 2, 3]
    assert is_picture(dpo / "dpo.png")


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(
    server: Server, dpo: Path, tmp_path: Path
):
    recipe(server, "dpo", "--steps", "3", *QUICK_DPO, "--sdk", "tinker", "--out", str(tmp_path))
    resumed, whole = figures(dpo, "dpo"), figures(tmp_path, "dpo")
    assert resumed.pop("state_path") != whole.pop("state_path")
    assert resumed == whole


@pytest.mark.slow
def test_checkpoints_are_compared_with_their_base(server: Server, dpo: Path, tmp_path: Path):
    path = figures(dpo, "dpo")["state_path"]
    said = recipe(server, "eval_checkpoint", path, "--held-out", "2", "--out", str(tmp_path))
    table = figures(tmp_path, "eval_checkpoint")
    assert list(table) == ["base", path]
    assert all(0 <= share <= 1 for row in table.values() for share in row.values())
    assert f"\n{path} " in said
    assert is_picture(tmp_path / "eval_checkpoint.png")


def test_checkpoints_of_the_same_name_have_bars_of_their_own():
    runs = ("0a1b2c3d-77", "0a1b2c3d-77", "ffffffff-00")
    names = [f"tinker://{run}:train:{i}/weights/sft" for i, run in enumerate(runs)]
    code = f"import eval_checkpoint; print(*eval_checkpoint.labels({['base', *names]}))"
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, cwd=ROOT / "cookbook", text=True, env=IMPORTING)
    runs = ("0a1b2c3d:train:0", "0a1b2c3d:train:1", "ffffffff:train:2")
    assert said.split() == ["base", *(f"{run}/weights/sft" for run in runs)]


@pytest.mark.slow
def test_a_prompt_with_examples_is_learned(server: Server, tmp_path: Path):
    quick = ("--steps", "4", "--batch-size", "8", "--learning-rate", "1e-3", "--held-out", "2")
    recipe(server, "prompt_distillation", *quick, "--out", str(tmp_path))
    steps = steps_of(tmp_path, "prompt_distillation")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert max(step["teacher"] for step in steps) > 0, "the prompt gives the right answers' form"
    assert is_picture(tmp_path / "prompt_distillation.png")


@pytest.mark.slow
def test_a_loss_of_one_s_own_makes_the_sum_beside_unlikely(server: Server, tmp_path: Path):
    quick = ("--steps", "4", "--batch-size", "4", "--learning-rate", "1e-3", "--held-out", "2")
    recipe(server, "custom_loss", "--sdk", "tinker", *quick, "--out", str(tmp_path))
    steps = steps_of(tmp_path, "custom_loss")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["loss"] == pytest.approx(step["right"] + step["beside"]) for step in steps)
    assert steps[-1]["right"] < steps[0]["right"] - 1
    assert is_picture(tmp_path / "custom_loss.png")


QUICK_GAMES = ("--warm-up", "3", "--group-size", "4", "--held-out", "2", "--learning-rate", "1e-3")


def test_games_of_several_turns_are_learned_from(server: Server, tmp_path: Path):
    recipe(server, "rl_multiturn", "--steps", "1", *QUICK_GAMES, "--out", str(tmp_path))
    run = figures(tmp_path, "rl_multiturn")
    assert any(0 < reward < 1 for reward in run["values"]), "no group had anything to teach"
    assert any(", " in answer for _, answer, _ in run["before"]["examples"]), "no second guess"
    assert is_picture(tmp_path / "rl_multiturn.png")


@pytest.mark.slow
def test_games_gone_on_with_are_those_that_were_never_stopped(server: Server, tmp_path: Path):
    folders = {goes: tmp_path / "-".join(goes) for goes in (("2",), ("1", "2"))}
    for goes, folder in folders.items():
        for steps in goes:
            common = ("--save-every", "1", "--out", str(folder))
            said = recipe(server, "rl_multiturn", "--steps", steps, *QUICK_GAMES, *common)
        assert ("going on behind step 1" in said) == (len(goes) == 2)
    whole, resumed = (figures(folder, "rl_multiturn") for folder in folders.values())
    assert whole.pop("state_path") != resumed.pop("state_path")
    assert whole == resumed


def drafts_of(server: Server) -> tuple[int, int]:
    """Drafted tokens that were judged since the server's start, and those accepted."""
    with httpx.Client(base_url=server.base_url, headers={"X-API-Key": server.api_key}) as http:
        speculation = http.get("/health").raise_for_status().json().get("speculation", {})
    drafters = [each for model in speculation.values() for each in model["drafters"].values()]
    verified, accepted = (
        sum(depth[name] for each in drafters for depth in each["depths"])
        for name in ("verified", "accepted")
    )
    return verified, accepted


@pytest.mark.slow
def test_what_becomes_of_drafts_is_told_by_step(server: Server, tmp_path: Path):
    before = drafts_of(server)
    quick = ("--steps", "3", "--batch-size", "4", "--questions", "3", "--learning-rate", "2e-3")
    recipe(server, "drafter_loop", "--sdk", "tinker", *quick, "--out", str(tmp_path))
    steps = steps_of(tmp_path, "drafter_loop")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["tokens"] >= 3 for step in steps)
    # How much is drafted is decided by what it costs on this machine: perhaps nothing.
    drafted, accepted = (
        sum(step["drafted"] for step in steps),
        sum(round(step["accepted"] * step["drafted"]) for step in steps),
    )
    assert (drafted, accepted) == tuple(map(int.__sub__, drafts_of(server), before))
    assert is_picture(tmp_path / "drafter_loop.png")


@pytest.mark.slow
def test_learning_rates_are_trained_side_by_side(server: Server, tmp_path: Path):
    rates = ("1e-5", "1e-3", "2e-2")
    quick = ("--batch-size", "4", "--save-every", "2", "--rates", *rates, "--out", str(tmp_path))
    assert "going on" not in recipe(server, "sweep", "--steps", "3", *quick)
    said = recipe(server, "sweep", "--steps", "4", *quick)
    assert "going on behind step 2" in said
    assert [step["step"] for step in steps_of(tmp_path, "sweep")] == [1, 2, 3, 4]
    found = figures(tmp_path, "sweep")
    assert found["best"] == 1e-3
    assert "best: 0.001; 3 rates" in said
    assert is_picture(tmp_path / "sweep.png")


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("sft", "--model", "nobody/nothing"), "nobody/nothing"),
        (("agent_rl", "--api-key", "tml-wrong"), "401"),
        (("rl", "tinker://nothing/weights/none"), "tinker://nothing/weights/none"),
    ],
    ids=("model", "key", "path"),
)
def test_what_the_server_refuses_is_named_in_one_line(
    server: Server, command: tuple[str, ...], named: str, sdk: str
):
    said = recipe(server, *command, "--sdk", sdk, ok=False)
    assert named in said
    assert "Traceback" not in said
