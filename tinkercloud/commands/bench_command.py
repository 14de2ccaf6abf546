"""What `tinkercloud bench speculation` does: one model, its workloads one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkercloud.commands.bench import COLUMNS, EngineFactory, compare, workloads
from tinkercloud.config import Config
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import choose_device, choose_dtype, settle, usable_cores
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, speculate
from tinkercloud.errors import ConfigError
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

REPEATS = 3
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """tokens: of each sample. at_once: samples, at most."""

    tokens: int
    at_once: int


def rows(config: Config, options: BenchOptions, say: Callable[[str], None]) -> list[Row]:
    """One for each workload, the columns by name. say: is told of each as it is done."""
    threads = config.engine.threads or usable_cores()
    torch.set_num_threads(threads)
    cache_dir = config.data_dir / "cache"
    make = speculate(
        DrafterSettings(
            config.speculate, config.speculate_trace, threads, cache_dir, config.data_dir / "drafts"
        )
    )
    if make is None:
        raise ConfigError("--speculate off has nothing to compare; name a drafter")
    base = base_of(config)
    if base.decoder is None:
        raise ConfigError(f"{base.name} has no tokenizer; the texts of this benchmark need one")
    version = Version("bench", base, base.weights, None, 1.0)
    engines = EngineFactory(max(options.at_once, 1), config.engine.kv_cache_bytes, threads, make)
    found = []
    decoder = base.decoder
    settle()  # as the engine's process does
    for workload in workloads(version, lambda text: decoder.encode(text).ids, *_sizes(options)):
        comparison = compare(workload, engines, REPEATS)
        found.append(dict(zip(COLUMNS, comparison.cells(), strict=True)))
        say(f"{workload.name}, {workload.at_once} at once: {comparison.times:.2f}")
    return found


def table(found: Sequence[Row]) -> str:
    lines = [list(COLUMNS), *([str(row[name]) for name in COLUMNS] for row in found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _sizes(options: BenchOptions) -> tuple[int, int]:
    if options.tokens < 2 or options.at_once < 1:
        raise ConfigError("--tokens must be at least 2 and --at-once at least 1")
    return options.tokens, options.at_once


def base_of(config: Config) -> BaseModel:
    """The first model of the settings."""
    source = config.models[0]
    device = choose_device()
    tokenizer = ensure_tokenizer_folder(source.path, config.data_dir / "cache")
    dtype = choose_dtype(config.dtype, device)
    return BaseModel.load(source.name, source.path, tokenizer, dtype, device)
