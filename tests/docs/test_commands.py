"""Every command of the pages runs: here on the backend `fake`, or in the test that is named."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.serving import QUIET, ROOT
from tests.waiting import wait_for_line
from tinkercloud.cli import _parser

# benchmarks/peers.md is left out: it installs other projects, over a network.
PAGES = [page for page in pages() if not page.name.startswith("benchmarks/")]
LIMIT_S = 300.0

WHEEL = "tests/packaging/test_wheel.py"
DEPLOY = "tests/docs/test_deploy_files.py"
WEIGHTS = "tests/e2e/test_weights_out_and_in.py"
BACKUP = "tests/commands/test_backup.py::test_a_backup_beside_a_running_server"
REPLAYS = "tests/e2e/test_replays.py"
REPLAYED = "test_the_run_is_computed_again_with_the_same_bits"
BRANCHED = "test_a_branch_goes_on_bit_for_bit_and_is_told_from_its_run_where_it_leaves_it"
VERIFIED = "test_a_receipt_is_verified_by_a_stranger"
CLI = "tests/e2e/test_tinker_cli.py"
INSTALLED = f"{WHEEL}::test_the_engine_uses_the_kernels_of_the_wheel_or_compiles_its_sources"
AGENTS = "tests/chat/test_captured_agents.py"
WITHOUT_GPU = (
    "tests/cluster/test_without_gpu.py::"
    "test_it_trains_and_samples_and_goes_on_when_the_raylet_is_killed"
)
IMAGE = f"{DEPLOY}::test_the_images_instructions_are_dockers"


@dataclass(frozen=True)
class Elsewhere:
    """test: what runs the command, or the part of it that can run without what it needs."""

    test: str
    reason: str


DRAFT_WORKER = "tests/e2e/test_draft_worker.py"
POOL = "tests/commands/test_pool.py"
POOL_RUNS = "tests/pool/test_running.py::test_a_pool_starts_answers_swaps_and_stops"
POOL_TUNED = "tests/pool/test_measured.py::test_a_pool_is_measured_and_tuned"
PEERS = (
    "tests/pool/distribution/test_peers.py::"
    "test_two_peers_end_with_the_whole_file_though_its_only_seeder_is_killed"
)
POOL_REAL = "tests/pool/test_llamacpp.py"
PIPELINE = "tests/e2e/test_pipeline.py::test_three_processes_say_what_the_server_says"
COVERED = {
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": Elsewhere(
        INSTALLED, "it needs an index; the test's engine runs on such a build"
    ),
    "pip install '.[embedded]'": Elsewhere(
        INSTALLED, "it needs an index; the test installs the wheel beside the extra's packages"
    ),
    "pip wheel --no-deps --wheel-dir dist .": Elsewhere(
        f"{WHEEL}::test_the_wheel_has_every_file_of_the_packages", "the test builds it in a copy"
    ),
    'pip install "$(ls dist/tinkercloud-*.whl)[embedded]"': Elsewhere(
        INSTALLED, "it needs an index for the extra's packages"
    ),
    "pip install tinker==0.38.0": Elsewhere(
        "tests/docs/test_commands.py::test_the_client_that_is_installed_is_the_one_of_the_tests",
        "it needs an index",
    ),
    "vllm serve MODEL": Elsewhere(
        "tests/e2e/test_proxy_on_vllm.py::test_answers_are_those_of_vllm_alone",
        "vLLM is not among our packages; the test starts it with these flags",
    ),
    "tinkercloud top": Elsewhere(
        "tests/commands/test_top.py::test_once_shows_what_ended_in_the_interval",
        "it needs a server, and ends by Ctrl-C",
    ),
    "tinkercloud report ": Elsewhere(
        "tests/commands/test_report.py::test_a_file_is_followed_as_it_grows",
        "it needs a run and the file of a script, and ends by Ctrl-C",
    ),
    "tinkercloud generate ": Elsewhere(
        "tests/commands/test_chat.py::test_a_text_is_continued_and_its_numbers_are_beside_it",
        "it needs a server whose model has a tokenizer",
    ),
    "tinkercloud chat ": Elsewhere(
        "tests/commands/test_chat.py::test_a_checkpoint_talks_beside_its_base",
        "it needs a checkpoint",
    ),
    "tinkercloud bench pipeline ": Elsewhere(
        "tests/commands/test_pipeline.py::"
        "test_all_contenders_sample_the_same_and_a_trace_shows_both_sides",
        "it needs a model; the test runs it on a tiny one",
    ),
    "tinkercloud draft-worker ": Elsewhere(
        f"{DRAFT_WORKER}::test_a_worker_drafts_and_its_death_changes_no_sample",
        "it needs a model, and ends by Ctrl-C",
    ),
    "tinkercloud proxy ": Elsewhere(
        "tests/e2e/test_proxy.py"
        "::test_answers_are_the_target_s_with_drafts_of_servers_and_of_the_text",
        "it needs servers, and ends by Ctrl-C",
    ),
    "tinkercloud target-worker ": Elsewhere(PIPELINE, "it needs a model, and ends by Ctrl-C"),
    "tinkercloud generate --target ": Elsewhere(PIPELINE, "it needs workers"),
    "tinkercloud chat --target ": Elsewhere(PIPELINE, "it needs workers"),
    'python3 -c "import secrets': Elsewhere(
        f"{DRAFT_WORKER}::test_a_worker_drafts_and_its_death_changes_no_sample",
        "the test writes a key of its own",
    ),
    "ssh -N -L ": Elsewhere(
        f"{DRAFT_WORKER}::test_a_worker_drafts_and_its_death_changes_no_sample",
        "it needs another machine; the test's worker is behind loopback too",
    ),
    "scp other-laptop:": Elsewhere(
        f"{DRAFT_WORKER}::test_a_worker_drafts_and_its_death_changes_no_sample",
        "it needs another machine",
    ),
    "tinkercloud pool init ": Elsewhere(
        f"{POOL}::test_init_writes_a_file_that_plan_reads", "it needs a model"
    ),
    "tinkercloud pool plan": Elsewhere(
        f"{POOL}::test_init_writes_a_file_that_plan_reads", "it needs a model"
    ),
    'CMAKE_ARGS="-DGGML_RPC=ON" pip install': Elsewhere(
        f"{POOL_REAL}::test_layers_on_two_workers_give_the_text_of_one_machine",
        "it needs an index and many minutes",
    ),
    "tinkercloud pool start": Elsewhere(POOL_RUNS, "it needs llama.cpp"),
    "tinkercloud pool status": Elsewhere(POOL_RUNS, "it needs a pool that runs"),
    "tinkercloud pool swap ": Elsewhere(POOL_RUNS, "it needs a pool that runs"),
    "tinkercloud pool logs ": Elsewhere(POOL_RUNS, "it needs a pool that runs"),
    "tinkercloud pool stop": Elsewhere(POOL_RUNS, "it needs a pool that runs"),
    "tinkercloud serve --pool pool.yaml": Elsewhere(
        f"{POOL_REAL}::test_a_served_pool_s_model_chats_and_is_not_trained",
        "it needs a pool's file",
    ),
    "tinkercloud pool doctor": Elsewhere(
        "tests/pool/test_measured.py::test_doctor_finds_nothing_missing_in_a_pool_that_can_run",
        "it needs llama.cpp",
    ),
    "tinkercloud pool benchmark": Elsewhere(POOL_TUNED, "it needs a pool that runs"),
    "tinkercloud pool tune ": Elsewhere(POOL_TUNED, "it needs a pool that runs"),
    "tinkercloud pool reclaim": Elsewhere(
        f"{POOL_REAL}::test_pages_of_the_models_file_are_freed_and_the_text_stays",
        "it needs a pool that runs",
    ),
    "tinkercloud pool distribute": Elsewhere(
        f"{POOL}::test_distribute_hands_the_files_to_rsync", "it needs another machine"
    ),
    "tinkercloud pool seed ": Elsewhere(PEERS, "it needs a model, and ends by Ctrl-C"),
    "tinkercloud pool fetch ": Elsewhere(PEERS, "it needs a seeder"),
    "tinkercloud pool worker ": Elsewhere(
        "tests/pool/test_running.py::test_a_worker_by_hand_with_a_key_answers_only_to_it",
        "it needs a GPU, and ends by Ctrl-C",
    ),
    "tinkercloud pool inspect ": Elsewhere(
        f"{POOL}::test_inspect_shows_layers_and_tensors", "it needs a model"
    ),
    "tinkercloud replay RUN": Elsewhere(f"{REPLAYS}::{REPLAYED}", "it needs a run"),
    "tinkercloud branch RUN": Elsewhere(f"{REPLAYS}::{BRANCHED}", "it needs a run"),
    "tinkercloud diff RUN_A": Elsewhere(f"{REPLAYS}::{BRANCHED}", "it needs two runs"),
    "tinkercloud receipt ": Elsewhere(f"{REPLAYS}::{VERIFIED}", "it needs a run"),
    "tinkercloud verify ": Elsewhere(f"{REPLAYS}::{VERIFIED}", "it needs a receipt"),
    "tinkercloud backup ": Elsewhere(f"{BACKUP}_is_a_moment_of_it", "it needs a data folder"),
    "tinkercloud restore ": Elsewhere(f"{BACKUP}_is_a_moment_of_it", "it needs a backup"),
    "tinkercloud import ": Elsewhere(
        f"{WEIGHTS}::test_an_adapter_of_peft_is_imported_and_sampled", "it needs an adapter"
    ),
    "tinker checkpoint download ": Elsewhere(f"{CLI}::test_download", "it needs a checkpoint"),
    "tinker checkpoint push-hf ": Elsewhere(f"{CLI}::test_push_hf", "it needs a hub"),
    "curl -fsSL -H": Elsewhere(
        "tests/api/checkpoints/test_downloads.py::test_an_archive_is_a_tar_behind_a_redirect",
        "it needs a checkpoint",
    ),
    "docker build -t tinkercloud .": Elsewhere(IMAGE, "it needs Docker and a network"),
    "docker run -p 8700:8700 -v tinkercloud-data:/data tinkercloud": Elsewhere(
        IMAGE, "it needs the image"
    ),
    "pip install openai": Elsewhere(
        f"{AGENTS}::test_environment_variables_alone_lead_an_agent_into_a_session",
        "it needs an index; the test's agent runs on that package",
    ),
    "tinkercloud captures": Elsewhere(
        f"{AGENTS}::test_the_command_makes_lists_rewards_closes_and_deletes_a_session",
        "it needs a server with turns in a session",
    ),
    "python cookbook/agent_rl.py": Elsewhere(
        "tests/e2e/test_captured_agent.py::test_the_recipe_trains_the_agent_goes_on_and_leaves_its_curve",
        "it takes minutes on real weights",
    ),
    "docker logs CONTAINER": Elsewhere(IMAGE, "it needs the image"),
    "python3 -m venv s": Elsewhere(WITHOUT_GPU, "it is for what needs an index"),
    "server/bin/pip install": Elsewhere(INSTALLED, "it needs an index"),
    "sglang/bin/pip install": Elsewhere(
        WITHOUT_GPU, "it needs an index; the test's engines have these packages"
    ),
    "server/bin/tinkercloud serve --backend cluster --cluster-device cpu": Elsewhere(
        WITHOUT_GPU, "it needs SGLang"
    ),
    "tinkercloud serve --backend cluster": Elsewhere(
        f"{DEPLOY}::test_every_setting_that_is_named_exists", "it needs GPUs on two nodes"
    ),
}
"""By the beginning of a command."""

AS_RUN = {
    "tinkercloud plan MODEL --gpus N": "tinkercloud plan tests/planning/configs/Qwen3-0.6B.json "
    "--gpus 8",
    "tinkercloud keys add [USER]": "tinkercloud keys add ada",
    "tinkercloud keys set KEY_ID": "tinkercloud keys set "
    "$(tinkercloud keys list | head -1 | cut -d' ' -f1) --role read-only --quota models=2",
    "tinkercloud keys revoke KEY_ID": "tinkercloud keys revoke "
    "$(tinkercloud keys list | head -1 | cut -d' ' -f1)",
    "tinkercloud serve --model Qwen/Qwen3-0.6B=/path/to/Qwen3-0.6B": "tinkercloud serve "
    "--backend embedded --speculate off --model Qwen/Qwen3-0.6B=$TINY",
    "tinkercloud serve --model local/qwen=/path/to/Qwen3-0.6B "
    "--alias Qwen/Qwen3-4B-Instruct-2507=local/qwen": "tinkercloud serve --backend embedded "
    "--speculate off --model local/qwen=$TINY --alias Qwen/Qwen3-4B-Instruct-2507=local/qwen",
}
"""Commands with a placeholder, filled in."""


def commands_of(page: Page) -> list[str]:
    """The commands of a page's `sh` blocks, without comments, each in one line."""
    lines = (
        line for block in page.blocks("sh") for line in block.replace("\\\n", " ").splitlines()
    )
    without_comments = (re.sub(r"(^|\s+)#.*$", "", line) for line in lines)
    return [" ".join(line.split()) for line in without_comments if line.strip()]


def is_covered(command: str) -> bool:
    return any(command.startswith(start) for start in COVERED)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))
BENCHMARKS = [command for command in COMMANDS if command.startswith("python -m benchmarks.")]
# Nothing else is ever run: a command that is new to a page may install, fetch or remove things.
HARMLESS = re.compile(r"(tinkercloud (serve|doctor|models|plan|keys)|make|export)\b[^;&|]*")
RUN_HERE = [each for each in COMMANDS if HARMLESS.fullmatch(each) and not is_covered(each)]


def test_every_command_of_the_pages_is_run_by_a_test() -> None:
    run = {*RUN_HERE, *BENCHMARKS}
    left = [command for command in COMMANDS if command not in run and not is_covered(command)]
    assert left == [], "name the test that runs it in COVERED"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, str]:
    """One data directory for all commands; `fake` where a command names no backend."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TINKERCLOUD_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    data_dir = str(tmp_path_factory.mktemp("commands"))
    return inherited | QUIET | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TINY": str(folder),
        "TINKERCLOUD_BACKEND": "fake",
        "TINKERCLOUD_PORT": "0",
        "TINKERCLOUD_DATA_DIR": data_dir,
    }  # fmt: skip


@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_runs(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    line = AS_RUN.get(command, command).replace("make ", "make --dry-run ", 1)
    serves = line.startswith("tinkercloud serve")
    output = tmp_path / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}" if serves else line],
            stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
        )  # fmt: skip
    try:
        if serves:
            wait_for_line("^ready: ", output, process)
            process.terminate()
        assert process.wait(LIMIT_S) == 0, output.read_text()
    finally:
        process.kill()


HELP = """
import contextlib, runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    print("module", module, flush=True)
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.slow
def test_every_benchmark_has_the_options_that_are_named(environment: dict[str, str]) -> None:
    """What they measure takes minutes; tests/benchmarks runs their parts."""
    modules = sorted({command.split()[2] for command in BENCHMARKS})
    assert modules
    done = subprocess.run(
        [sys.executable, "-c", HELP, *modules],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LIMIT_S,
    )  # fmt: skip
    helps = dict(part.split("\n", 1) for part in done.stdout.split("module ")[1:])
    for command in BENCHMARKS:
        _, _, module, *options = command.split()
        for option in options:
            assert not option.startswith("--") or option in helps[module], (command, done.stderr)


@pytest.mark.parametrize("command", COVERED)
def test_a_command_that_is_not_run_here_names_a_test_that_exists(command: str) -> None:
    path, _, name = COVERED[command].test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    assert any(each.startswith(command) for each in COMMANDS), "no page has it any more"


def test_every_filled_in_command_is_on_a_page() -> None:
    assert set(AS_RUN) <= set(COMMANDS)


def test_the_client_that_is_installed_is_the_one_of_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (command,) = (each for each in COMMANDS if each.startswith("pip install tinker=="))
    assert command.split()[-1] in project["optional-dependencies"]["test"]


# commands within lines: they are not run, but their parts exist


def spans(start: str) -> list[tuple[str, str]]:
    return [(p.name, span) for p in PAGES for span in p.spans() if span.startswith(start)]


@pytest.mark.parametrize(("page", "command"), spans("tinkercloud "))
def test_a_command_within_a_line_has_commands_and_flags_that_exist(page: str, command: str) -> None:
    assert unknown_words(shlex.split(command)[1:]) == []


def unknown_words(words: list[str]) -> list[str]:
    """Of a command line of ours: flags and subcommands that the parsers do not know."""
    parser, unknown = _parser(), list[str]()
    for word in words:
        choices = subcommands(parser)
        flag = word.partition("=")[0]
        if word.startswith("--"):
            unknown += [] if flag in parser._option_string_actions else [word]
        elif word in choices:
            # In "draft collect | evaluate" the next one is another of the same parser.
            parser = choices[word] if subcommands(choices[word]) or "|" not in words else parser
        elif choices and word not in ("|", "...") and not word.isupper():
            unknown.append(word)
    return unknown


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    group = parser._subparsers
    return dict(group._group_actions[0].choices or {}) if group else {}  # type: ignore[arg-type]


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert unknown_words(["serve", "--no-such-flag"]) == ["--no-such-flag"]
    assert unknown_words(["draft", "collect", "|", "forget"]) == ["forget"]
    assert unknown_words(["plan", "MODEL", "--gpus", "8"]) == []


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.M))


@pytest.mark.parametrize(("page", "command"), spans("make "))
def test_a_target_within_a_line_exists(page: str, command: str) -> None:
    assert {word for word in command.split()[1:] if "=" not in word} <= targets()


@pytest.mark.parametrize(("page", "command"), spans("python -m "))
def test_a_module_within_a_line_exists(page: str, command: str) -> None:
    module = command.split()[2]
    ours = module.startswith(("benchmarks", "tests", "tinkercloud"))
    place = Path(ROOT, *module.split("."))
    assert not ours or place.with_suffix(".py").exists() or (place / "__main__.py").exists()


@pytest.mark.parametrize(("page", "command"), spans("pytest "))
def test_the_tests_that_a_line_names_exist(page: str, command: str) -> None:
    named = [word for word in command.split()[1:] if word.startswith("tests/")]
    assert named
    assert [word for word in named if not (ROOT / word).exists()] == []
