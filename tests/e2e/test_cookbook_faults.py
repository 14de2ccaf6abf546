"""A recipe that cannot begin ends in a sentence: where its packages, its server or its folder are
not there. (Keys, models and paths that a server refuses: test_cookbook_own.py.)"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT

STATE = "tinker://nothing/weights/none"
ARGUMENTS = {
    "distill_on_policy": [STATE, STATE],
    **{name: [STATE] for name in ("rl", "rl_async", "eval_checkpoint", "export_and_chat")},
}
RECIPES = sorted(
    path.stem
    for path in (ROOT / "cookbook").glob("*.py")
    if path.stem not in ("demo", "resume_after_kill")  # these start a server of their own
)
BEYOND_THE_CLIENT = ("matplotlib", "openai", "peft", "tinker", "torch", "transformers")
NEEDED = {"agent_rl": "openai", "custom_loss": "torch", "dpo": "torch", "export_and_chat": "torch"}
"""By recipe: the first package that it misses where there is only the client."""
# All in one process, as each would take a second to start.
RUN_ALL = """
import json, runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.path[:0] = ["cookbook", "."]
endings = {{}}
for name, arguments in {runs!r}.items():
    sys.argv = [f"{{name}}.py", *arguments]
    try:
        runpy.run_path(f"cookbook/{{name}}.py", run_name="__main__")
    except SystemExit as ending:
        endings[name] = str(ending.code)
print(json.dumps(endings))
"""


def run(missing: tuple[str, ...], runs: dict[str, list[str]]) -> "subprocess.CompletedProcess[str]":
    """The recipes with these arguments, where these packages are not installed."""
    return subprocess.run(
        [sys.executable, "-c", RUN_ALL.format(missing=missing, runs=runs)],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip


def endings(missing: tuple[str, ...], *options: str) -> dict[str, str]:
    """By recipe: what it says at its end."""
    common = ["--base-url", "http://127.0.0.1:9/", "--api-key", "tml-any", *options]
    done = run(missing, {name: ARGUMENTS.get(name, []) + common for name in RECIPES})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bare() -> dict[str, str]:
    return endings(BEYOND_THE_CLIENT)


def test_a_package_that_is_missing_is_named_with_what_installs_it(bare: dict[str, str]):
    said = {name: ending for name, ending in bare.items() if "pip install" in ending}
    assert said == {
        name: f"{name}.py: this needs {package}, which is not installed: pip install {package}"
        for name, package in NEEDED.items()
    }


def test_without_a_server_no_recipe_waits_for_one(bare: dict[str, str]):
    said = {name: ending for name, ending in bare.items() if name not in NEEDED}
    assert len(said) == len(RECIPES) - len(NEEDED)
    for name, ending in said.items():
        assert ending.startswith(f"{name}.py: no server answers at http://127.0.0.1:9 ("), ending
        assert "`tinkercloud serve` starts one" in ending


def test_a_folder_that_cannot_be_made_is_named_before_the_server_is_asked(tmp_path: Path):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out")
    drawn = tuple(name for name in BEYOND_THE_CLIENT if name != "matplotlib")
    for name, ending in endings(drawn, "--out", out).items():
        if name not in NEEDED:
            assert ending.startswith(f"{name}.py: "), ending
            assert out in ending


def test_a_client_that_is_not_installed_is_named():
    done = run(("tinker",), {"sft": ["--sdk", "tinker"]})
    assert "argument --sdk: this needs tinker, which is not installed" in done.stderr
    assert "Traceback" not in done.stderr
