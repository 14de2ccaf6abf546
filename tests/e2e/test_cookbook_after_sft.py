"""Our recipes SFT and RL, and those that begin with their weights, as commands against a real
server on SmolLM2: with the official client, in slow tests with ours too."""

from pathlib import Path

import pytest

from tests.e2e.own_recipes import figures, is_picture, recipe, steps_of
from tests.serving import Server
from tinker_gmi.run_metrics import RunMetrics

QUICK_SFT = ("--batch-size", "12", "--learning-rate", "1e-3", "--held-out", "2")
QUICK_RL = ("--problems", "4", "--group-size", "6", "--held-out", "2", "--save-every", "1")


@pytest.fixture(scope="module")
def official(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sft.py by the official client left its results, and rl.py from its weights in two
    goes."""
    folder = tmp_path_factory.mktemp("tinker")
    sft(server, folder, "tinker")
    assert "going on behind" not in rl(server, folder, "tinker", 1)
    assert "going on behind step 1" in rl(server, folder, "tinker", 2)
    return folder


@pytest.fixture(scope="module")
def ours(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise by our client, without rl.py."""
    folder = tmp_path_factory.mktemp("tinker_gmi")
    sft(server, folder, "tinker_gmi")
    return folder


def sft(server: Server, folder: Path, sdk: str) -> None:
    recipe(server, "sft", "--steps", "4", *QUICK_SFT, "--sdk", sdk, "--out", str(folder))


def rl(server: Server, folder: Path, sdk: str, num_steps: int) -> str:
    """What rl.py printed, from the weights that sft.py left in the folder."""
    where = ("--steps", str(num_steps), "--sdk", sdk, "--out", str(folder))
    return recipe(server, "rl", figures(folder, "sft")["state_path"], *QUICK_RL, *where)


def test_sft_lowers_the_loss(official: Path):
    losses = figures(official, "sft")["values"]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1


def test_rl_changes_the_weights_that_sft_left(official: Path):
    run = figures(official, "rl")
    assert len(run["values"]) == 2
    assert any(0 < reward < 1 for reward in run["values"]), "no group had anything to teach"
    # The seeds of both are the same, so unchanged weights would give the same answers.
    assert run["after"] != run["before"]


def test_the_server_is_told_the_rewards_of_every_step(server: Server, official: Path):
    """Also of those before a stop, which an earlier run of the server's took."""
    run_id = figures(official, "rl")["state_path"].removeprefix("tinker://").split("/")[0]
    with RunMetrics(server.base_url, server.api_key) as metrics:
        shown = {point["step"]: point["metrics"] for point in metrics.reported(run_id)}
    steps = steps_of(official, "rl")
    assert shown == {step.pop("step"): step for step in steps}
    assert {"reward", "loss"} <= shown[1].keys()


def assert_same_run(ours: Path, official: Path, name: str) -> None:
    mine, theirs = figures(ours, name), figures(official, name)
    assert mine.pop("state_path") != theirs.pop("state_path")
    assert mine == theirs


@pytest.mark.slow
def test_both_clients_give_the_same_run_by_the_same_seed(ours: Path, official: Path):
    assert_same_run(ours, official, "sft")


@pytest.mark.slow
def test_rl_in_one_go_by_our_client_is_that_in_two_by_the_official_one(
    server: Server, ours: Path, official: Path
):
    rl(server, ours, "tinker_gmi", 2)
    assert_same_run(ours, official, "rl")


@pytest.mark.slow
def test_sft_goes_on_behind_its_last_saved_step(server: Server, ours: Path):
    said = recipe(server, "sft", "--steps", "5", *QUICK_SFT, "--out", str(ours))
    assert "going on behind step 4" in said
    assert [step["step"] for step in steps_of(ours, "sft")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["sft", "rl"])
def test_a_recipe_leaves_a_picture(official: Path, name: str):
    assert is_picture(official / f"{name}.png")


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(server: Server, official: Path, tmp_path: Path):
    student, teacher = (figures(official, name)["state_path"] for name in ("sft", "rl"))
    quick = ("--steps", "1", *QUICK_RL, "--out", str(tmp_path))
    recipe(server, "distill_on_policy", student, teacher, *quick)
    assert [step["step"] for step in steps_of(tmp_path, "distill_on_policy")] == [1]
    run = figures(tmp_path, "distill_on_policy")
    assert run["before"] == figures(official, "rl")["before"]
    assert is_picture(tmp_path / "distill_on_policy.png")


@pytest.mark.slow
def test_rl_goes_on_while_samples_are_underway(server: Server, official: Path, tmp_path: Path):
    student = figures(official, "sft")["state_path"]
    quick = ("--steps", "3", "--lag", "1", *QUICK_RL, "--out", str(tmp_path))
    recipe(server, "rl_async", student, *quick)
    steps = steps_of(tmp_path, "rl_async")
    assert [step["age"] for step in steps] == [0, 1, 1]
    trained = [step["ratio"] for step in steps if "ratio" in step]
    assert trained, "no group had anything to teach"
    assert is_picture(tmp_path / "rl_async.png")


@pytest.mark.slow
def test_an_exported_adapter_answers_as_the_door_does(
    server: Server, official: Path, smollm2_folder: Path, tmp_path: Path
):
    state = figures(official, "sft")["state_path"]
    quick = ("--weights", str(smollm2_folder), "--held-out", "3", "--out", str(tmp_path))
    recipe(server, "export_and_chat", state, *quick)
    found = figures(tmp_path, "export_and_chat")
    assert found["num_same"] == 3
    base, checkpoint, _ = found["answers"].values()
    assert base != checkpoint
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 100_000
    assert is_picture(tmp_path / "export_and_chat.png")
