"""Our own recipes, as commands, against a real server on SmolLM2, with both clients."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.serving import QUIET, ROOT, Server
from tinker_gmi.run_metrics import RunMetrics

STATE = re.compile(r"^weights: (tinker://\S+)$", re.M)
LIMIT_S = 300.0


def recipe(server: Server, name: str, *arguments: str, ok: bool = True) -> str:
    """What `cookbook/NAME.py` printed; it must succeed, or fail when not ok."""
    environment = {**os.environ, **server.sdk_environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "cookbook" / f"{name}.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout if ok else done.stderr


def figures(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / f"{name}.json").read_text())


def steps_of(folder: Path, name: str) -> list[dict[str, float]]:
    """The lines of a run's metrics, those of saved weights and of the beginning left out."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [line for line in lines if not {"state", "before"} & line.keys()]


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


QUICK_SFT = ("--batch-size", "12", "--learning-rate", "1e-3", "--held-out", "2")
QUICK_RL = ("--problems", "4", "--group-size", "6", "--held-out", "2", "--save-every", "1")


SDKS = ["tinker_gmi", "tinker"]


@pytest.fixture(scope="module")
def outputs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By client: where sft.py and then rl.py, from its weights, left their results; RL by the
    official one in two goes."""
    folders = {sdk: tmp_path_factory.mktemp(sdk) for sdk in SDKS}
    for sdk, goes in zip(SDKS, (("2",), ("1", "2")), strict=True):
        common = ("--sdk", sdk, "--out", str(folders[sdk]))
        said = recipe(server, "sft", "--steps", "4", *QUICK_SFT, *common)
        for steps in goes:
            state = STATE.search(said)[1]
            told = recipe(server, "rl", state, "--steps", steps, *QUICK_RL, *common)
        assert ("going on behind step 1" in told) == (len(goes) == 2)
    return folders


@pytest.mark.parametrize("sdk", SDKS)
def test_sft_lowers_the_loss_with_either_client(outputs: dict[str, Path], sdk: str):
    losses = figures(outputs[sdk], "sft")["values"]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("sdk", SDKS)
def test_rl_changes_the_weights_that_sft_left_with_either_client(
    outputs: dict[str, Path], sdk: str
):
    run = figures(outputs[sdk], "rl")
    assert len(run["values"]) == 2
    assert any(0 < reward < 1 for reward in run["values"]), "no group had anything to teach"
    # The seeds of both are the same, so unchanged weights would give the same answers.
    assert run["after"] != run["before"]


@pytest.mark.parametrize("sdk", SDKS)
def test_the_server_is_told_the_rewards_of_every_step(
    server: Server, outputs: dict[str, Path], sdk: str
):
    """Also of those before a stop, which an earlier run of the server's took."""
    run_id = figures(outputs[sdk], "rl")["state_path"].removeprefix("tinker://").split("/")[0]
    with RunMetrics(server.base_url, server.api_key) as metrics:
        shown = {point["step"]: point["metrics"] for point in metrics.reported(run_id)}
    steps = steps_of(outputs[sdk], "rl")
    assert shown == {step.pop("step"): step for step in steps}
    assert {"reward", "loss"} <= shown[1].keys()


@pytest.mark.parametrize("name", ["sft", "rl"])
def test_both_clients_give_the_same_run_by_the_same_seed(outputs: dict[str, Path], name: str):
    ours, official = (figures(outputs[sdk], name) for sdk in SDKS)
    assert ours.pop("state_path") != official.pop("state_path")
    assert ours == official


def test_sft_goes_on_behind_its_last_saved_step(server: Server, outputs: dict[str, Path]):
    said = recipe(server, "sft", "--steps", "5", *QUICK_SFT, "--out", str(outputs["tinker_gmi"]))
    assert "going on behind step 4" in said
    assert [step["step"] for step in steps_of(outputs["tinker_gmi"], "sft")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["sft", "rl"])
def test_a_recipe_leaves_a_picture(outputs: dict[str, Path], name: str):
    assert is_picture(outputs["tinker"] / f"{name}.png")


QUICK_DPO = ("--pairs", "3", "--held-out", "2", "--save-every", "1")


@pytest.fixture(scope="module")
def dpo(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three steps in one go by our client, and by the official one in two goes."""
    folders = {sdk: tmp_path_factory.mktemp(f"dpo-{sdk}") for sdk in SDKS}
    for sdk, goes in zip(SDKS, (("3",), ("2", "3")), strict=True):
        for steps in goes:
            common = ("--sdk", sdk, "--out", str(folders[sdk]))
            said = recipe(server, "dpo", "--steps", steps, *QUICK_DPO, *common)
        assert ("going on behind step 2" in said) == (len(goes) == 2)
    return folders


def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(dpo: dict[str, Path]):
    ours, official = (figures(dpo[sdk], "dpo") for sdk in SDKS)
    assert ours["values"] == official["values"]
    assert ours["values"][0] == pytest.approx(np.log(2), abs=1e-6), "nothing is preferred yet"
    assert ours["values"][-1] < 0.5
    assert ours["after"] == official["after"]
    assert [step["step"] for step in steps_of(dpo["tinker"], "dpo")] == [1, 2, 3]
    assert is_picture(dpo["tinker"] / "dpo.png")


def test_checkpoints_are_compared_with_their_base(
    server: Server, dpo: dict[str, Path], tmp_path: Path
):
    path = figures(dpo["tinker"], "dpo")["state_path"]
    said = recipe(server, "eval_checkpoint", path, "--held-out", "2", "--out", str(tmp_path))
    table = figures(tmp_path, "eval_checkpoint")
    assert list(table) == ["base", path]
    assert all(0 <= share <= 1 for row in table.values() for share in row.values())
    assert f"\n{path} " in said
    assert is_picture(tmp_path / "eval_checkpoint.png")


def test_a_prompt_with_examples_is_learned(server: Server, tmp_path: Path):
    quick = ("--steps", "4", "--batch-size", "8", "--learning-rate", "1e-3", "--held-out", "2")
    recipe(server, "prompt_distillation", *quick, "--out", str(tmp_path))
    steps = steps_of(tmp_path, "prompt_distillation")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert max(step["teacher"] for step in steps) > 0, "the prompt gives the right answers' form"
    assert is_picture(tmp_path / "prompt_distillation.png")


def test_a_loss_of_one_s_own_makes_the_sum_beside_unlikely(server: Server, tmp_path: Path):
    quick = ("--steps", "4", "--batch-size", "4", "--learning-rate", "1e-3", "--held-out", "2")
    recipe(server, "custom_loss", "--sdk", "tinker", *quick, "--out", str(tmp_path))
    steps = steps_of(tmp_path, "custom_loss")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["loss"] == pytest.approx(step["right"] + step["beside"]) for step in steps)
    assert steps[-1]["right"] < steps[0]["right"] - 1
    assert is_picture(tmp_path / "custom_loss.png")


def test_games_of_several_turns_are_learned_from_and_gone_on_with(server: Server, tmp_path: Path):
    quick = ("--warm-up", "3", "--group-size", "4", "--held-out", "2", "--learning-rate", "1e-3")
    folders = {goes: tmp_path / "-".join(goes) for goes in (("2",), ("1", "2"))}
    for goes, folder in folders.items():
        for steps in goes:
            common = ("--save-every", "1", "--out", str(folder))
            said = recipe(server, "rl_multiturn", "--steps", steps, *quick, *common)
        assert ("going on behind step 1" in said) == (len(goes) == 2)
    whole, resumed = (figures(folder, "rl_multiturn") for folder in folders.values())
    assert whole.pop("state_path") != resumed.pop("state_path")
    assert whole == resumed
    assert any(0 < reward < 1 for reward in whole["values"]), "no group had anything to teach"
    assert any(", " in answer for _, answer, _ in whole["before"]["examples"]), "no second guess"
    assert is_picture(folders["1", "2"] / "rl_multiturn.png")


def test_a_student_comes_nearer_to_its_teacher(
    server: Server, outputs: dict[str, Path], tmp_path: Path
):
    student, teacher = (figures(outputs["tinker"], name)["state_path"] for name in ("sft", "rl"))
    quick = ("--steps", "2", *QUICK_RL, "--out", str(tmp_path))
    recipe(server, "distill_on_policy", student, teacher, *quick)
    steps = steps_of(tmp_path, "distill_on_policy")
    assert [step["step"] for step in steps] == [1, 2]
    run = figures(tmp_path, "distill_on_policy")
    assert run["before"] == figures(outputs["tinker"], "rl")["before"]
    assert is_picture(tmp_path / "distill_on_policy.png")


def test_rl_goes_on_while_samples_are_underway(
    server: Server, outputs: dict[str, Path], tmp_path: Path
):
    student = figures(outputs["tinker"], "sft")["state_path"]
    quick = ("--steps", "3", "--lag", "1", *QUICK_RL, "--sdk", "tinker", "--out", str(tmp_path))
    recipe(server, "rl_async", student, *quick)
    steps = steps_of(tmp_path, "rl_async")
    assert [step["age"] for step in steps] == [0, 1, 1]
    trained = [step["ratio"] for step in steps if "ratio" in step]
    assert trained, "no group had anything to teach"
    assert is_picture(tmp_path / "rl_async.png")


def test_an_exported_adapter_answers_as_the_door_does(
    server: Server, outputs: dict[str, Path], smollm2_folder: Path, tmp_path: Path
):
    state = figures(outputs["tinker"], "sft")["state_path"]
    quick = ("--weights", str(smollm2_folder), "--held-out", "3", "--out", str(tmp_path))
    recipe(server, "export_and_chat", state, "--sdk", "tinker", *quick)
    found = figures(tmp_path, "export_and_chat")
    assert found["num_same"] == 3
    base, checkpoint, _ = found["answers"].values()
    assert base != checkpoint
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 100_000
    assert is_picture(tmp_path / "export_and_chat.png")


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


def test_learning_rates_are_trained_side_by_side(server: Server, tmp_path: Path):
    rates = ("1e-5", "1e-3", "2e-2")
    quick = ("--steps", "4", "--batch-size", "4", "--rates", *rates, "--out", str(tmp_path))
    said = recipe(server, "sweep", *quick)
    found = figures(tmp_path, "sweep")
    assert found["best"] == 1e-3
    assert "best: 0.001; 3 rates" in said
    assert is_picture(tmp_path / "sweep.png")


def test_a_kill_of_the_server_changes_no_bit_of_a_run(
    demo_environment: dict[str, str], tmp_path: Path
):
    quick = ("--steps", "3", "--kill-at", "2", "--batch-size", "4", "--held-out", "2")
    command = [sys.executable, str(ROOT / "cookbook" / "resume_after_kill.py"), *quick]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=demo_environment, capture_output=True,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed; starting it again" in done.stdout
    assert "every loss and every answer is the same, to the last bit" in done.stdout
    found = figures(tmp_path / "out", "resume_after_kill")
    assert found["killed"] == found["plain"]
    assert found["plain"][-1] < found["plain"][0]
    assert is_picture(tmp_path / "out" / "resume_after_kill.png")


@pytest.mark.parametrize("sdk", SDKS)
def test_a_model_that_is_not_served_is_named_in_one_line(server: Server, sdk: str):
    said = recipe(server, "sft", "--sdk", sdk, "--model", "nobody/nothing", ok=False)
    assert "nobody/nothing" in said
    assert "Traceback" not in said


@pytest.fixture
def demo_environment(smollm2_gguf: Path, tmp_path: Path) -> dict[str, str]:
    """The weights where `make install` puts them, below a data directory of the test's own."""
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    (models / smollm2_gguf.name).symlink_to(smollm2_gguf)
    place = {"TINKERCLOUD_DATA_DIR": str(tmp_path / "data"), "TMPDIR": str(tmp_path)}
    return {**os.environ, **QUIET, **place, "PYTHONPATH": str(ROOT)}


def start_demo(environment: dict[str, str], out: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "cookbook" / "demo.py"), "--out", str(out)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def answers(port: str) -> bool:
    """Whether anything listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_its_server_and_leaves_nothing(
    demo_environment: dict[str, str], tmp_path: Path, how: signal.Signals
):
    demo = start_demo(demo_environment, tmp_path / "out")
    said = demo.stdout.readline() + demo.stdout.readline()
    port = re.search(r"^serving at http://127.0.0.1:(\d+)", said, re.M)[1]
    assert answers(port)
    time.sleep(1.0)
    demo.send_signal(how)
    rest = demo.communicate(timeout=60)[0]
    assert demo.returncode == 128 + how
    assert not answers(port)
    assert "Traceback" not in rest
    assert not list(tmp_path.glob("tinkercloud-demo-*"))


@pytest.mark.parametrize(
    ("how", "raised"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit")]
)
def test_a_signal_whose_exception_python_drops_is_heard_all_the_same(how: str, raised: str):
    script = f"""if True:
        import demo, os, signal, time
        class Last:
            def __del__(self):
                os.kill(os.getpid(), signal.{how})
                time.sleep(0.1)
        demo.end_when_asked()
        try:
            Last()
            print("dropped", flush=True)
            time.sleep(20)
        except {raised}:
            demo.heard()
            time.sleep(1.5 * demo.INSIST_S)
            print("heard once")
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT / "cookbook")},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["dropped", "heard once", ""], done.stderr


@pytest.mark.slow
def test_the_demo_learns_both_tasks_and_leaves_a_picture(
    demo_environment: dict[str, str], tmp_path: Path
):
    out = tmp_path / "out"
    demo = start_demo(demo_environment, out)
    said = demo.communicate(timeout=1800)[0]
    assert demo.returncode == 0, said
    sft, rl = figures(out, "sft"), figures(out, "rl")
    assert sft["values"][-1] < 0.2 * sft["values"][0]
    assert sft["before"]["accuracy"] < 0.1
    assert sft["after"]["accuracy"] > 0.7
    assert sum(rl["values"][-3:]) > sum(rl["values"][:3]) + 0.6
    assert rl["after"]["accuracy"] > rl["before"]["accuracy"] + 0.3
    assert is_picture(out / "demo.png")
    assert "TINKER_BASE_URL" in said
