"""`tinkercloud draft-worker`: drafts for engines on other machines."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud import logs
from tinkercloud.commands.listening import Listening, add_listening_options
from tinkercloud.commands.options import Arguments, add_settings, config_of, say
from tinkercloud.errors import ConfigError

if TYPE_CHECKING:
    from tinkercloud.config import Config
    from tinkercloud.embedded.drafting.worker_drafters import WorkerDrafters
    from tinkercloud.speculative.drafters.drafter import Drafter
    from tinkercloud.speculative.remote.messages import Target
    from tinkercloud.speculative.remote.worker import DraftWorker

SETTINGS = ("data_dir", "dtype", "engine.threads", "log_level", "log_format")
LISTEN = "127.0.0.1:8710"
SUFFIX = "suffix"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="a Hugging Face folder or GGUF file with its tokenizer; suffix: no model, drafts out "
        "of what samples were continued with before",
    )
    add_listening_options(parser, LISTEN)
    parser.add_argument(
        "--samples", type=int, default=256, help="of all engines that are kept at a time [256]"
    )
    parser.add_argument(
        "--idle-s", type=float, default=600.0, help="after which a sample is forgotten [600]"
    )
    parser.add_argument(
        "--kv-cache-mb", type=int, default=512, help="for each vocabulary, in 2**20 bytes [512]"
    )
    parser.add_argument(
        "--outcomes", type=int, default=8, help="of each round that are prepared for [8]"
    )
    add_settings(parser, SETTINGS)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinkercloud.speculative.remote.methods import DRAFT

    config = config_of(arguments)
    logs.configure(config.log_level, config.log_format)
    listening = Listening.of(arguments)
    worker = _worker(config, arguments)
    say(f"drafting with {arguments['model']}")
    listening.serve(worker, DRAFT, "serve --speculate remote:HOST:{port}")
    return 0


def _worker(config: "Config", arguments: Arguments) -> "DraftWorker":
    """Raises ConfigError."""
    from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
    from tinkercloud.speculative.remote.worker import DraftWorker, WorkerLimits

    limits = WorkerLimits(
        arguments["samples"], arguments["idle_s"], num_outcomes=arguments["outcomes"]
    )
    if arguments["model"] != SUFFIX:
        model_drafters = _model_drafters(config, arguments)
        return DraftWorker(model_drafters, limits, model_drafters.learned)
    drafters: dict[bytes, Drafter] = {}

    def make(target: "Target") -> "Drafter":
        return drafters.setdefault(target.vocabulary_digest, SuffixDrafter())

    return DraftWorker(make, limits)


def _model_drafters(config: "Config", arguments: Arguments) -> "WorkerDrafters":
    """Raises ConfigError."""
    from tinkercloud.commands.bench import load_base
    from tinkercloud.embedded.drafting.worker_drafters import WorkerDrafters
    from tinkercloud.embedded.forward.runners import runner_for
    from tinkercloud.embedded.model.device import set_up_torch, usable_cores

    path = Path(arguments["model"])
    if not path.exists():
        raise ConfigError(f"--model {path}: there is no such file or folder")
    threads = config.engine.threads or usable_cores()
    set_up_torch(threads)
    draft = load_base(f"draft {path.name}", path, config)
    pool_bytes = arguments["kv_cache_mb"] * 1024**2
    return WorkerDrafters(draft, runner_for(draft, threads), pool_bytes)
