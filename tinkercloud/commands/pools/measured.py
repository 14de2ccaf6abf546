"""`tinkercloud pool doctor | benchmark | tune | reclaim`."""

import json
from dataclasses import asdict

from tinkercloud.commands.options import Arguments, say, say_progress
from tinkercloud.commands.pools.running import folder_of, swapped
from tinkercloud.errors import ConfigError
from tinkercloud.pool.checks import diagnose
from tinkercloud.pool.measuring import Load, measure
from tinkercloud.pool.model_file import model_parts
from tinkercloud.pool.pool_file import load_pool, write_tensor_split
from tinkercloud.pool.pool_state import PoolFolder, PoolState
from tinkercloud.pool.reclaiming import reclaim
from tinkercloud.pool.sizes import size_text
from tinkercloud.pool.tuning import Split, candidate_splits


def doctor(arguments: Arguments) -> int:
    """1 where something is missing. Raises ConfigError."""
    pool = load_pool(arguments["file"])
    folder = folder_of(arguments)
    if folder.is_running:
        raise ConfigError(
            "the pool runs: `tinkercloud pool status` says how it is; `tinkercloud pool stop` ends "
            "it, and then all of it can be checked"
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    findings = []
    for finding in diagnose(pool, folder.path):
        say(finding.line())
        findings.append(finding)
    return 1 if any(finding.remedy for finding in findings) else 0


def benchmark(arguments: Arguments) -> int:
    """1 where a request failed. Raises ConfigError."""
    pool = load_pool(arguments["file"])
    state = _ready_state(folder_of(arguments))
    load = load_of(arguments)
    figures = measure(state.url, load, pool.coordinator.key(), say_progress)
    say(f"{state.model} on {len(state.plan)} devices: {figures.line()}")
    if arguments["json"] is not None:
        result = {"model": state.model, "plan": state.plan, "load": asdict(load)}
        arguments["json"].write_text(json.dumps(result | asdict(figures), indent=1) + "\n")
    return 1 if figures.failures else 0


def tune(arguments: Arguments) -> int:
    """Leaves the pool with the fastest split. Raises ConfigError."""
    pool = load_pool(arguments["file"])
    folder = folder_of(arguments)
    state = _ready_state(folder)
    model = pool.model(state.model)
    best: tuple[float, str, Split] | None = None
    tried = list[list[str]]()
    for text, split in candidate_splits([device[1] for device in state.devices]):
        candidate = model.model_copy(update={"tensor_split": split})
        state = swapped(folder, candidate, say_progress)
        if state.phase != "ready" or state.plan in tried:
            reason = state.text or "the same as one before"
            say(f"{text}: not measured: {reason}")
            continue
        tried.append(state.plan)
        figures = measure(state.url, load_of(arguments), pool.coordinator.key())
        say(f"{text}: {figures.line()}")
        if not figures.failures and (best is None or figures.tokens_per_s > best[0]):
            best = figures.tokens_per_s, text, split
    if best is None:
        raise ConfigError(f"no split of {model.name} could be measured; see `pool logs`")
    swapped(folder, model.model_copy(update={"tensor_split": best[2]}), say_progress)
    say(f"fastest: {best[1]}, {best[0]:.1f} tokens/s; the pool serves with it now")
    if arguments["write"]:
        write_tensor_split(arguments["file"], model.name, best[2])
        say(f"wrote it to {arguments['file']}")
    elif best[2] is not None:
        say(f"--write puts it into {arguments['file']}: tensor_split: {list(best[2])}")
    return 0


def reclaim_memory(arguments: Arguments) -> int:
    """Raises ConfigError."""
    pool = load_pool(arguments["file"])
    state = _ready_state(folder_of(arguments))
    assert state.llama_server_pid is not None
    done = reclaim(state.llama_server_pid, model_parts(pool.model(state.model).path))
    before, after = map(size_text, done.resident_bytes)
    say(f"llama-server's pages of files: {before} before, {after} now")
    before, after = map(size_text, done.available_bytes)
    say(f"available on this machine: {before} before, {after} now")
    return 0


def load_of(arguments: Arguments) -> Load:
    return Load(
        arguments["requests"],
        arguments["concurrency"],
        arguments["prompt_tokens"],
        arguments["tokens"],
    )


def _ready_state(folder: PoolFolder) -> PoolState:
    state = folder.read()
    if state is None or not folder.is_running:
        raise ConfigError("the pool does not run; `tinkercloud pool start` starts it")
    if state.phase != "ready":
        raise ConfigError(f"{state.model} is not ready but {state.phase}: {state.text}")
    return state
