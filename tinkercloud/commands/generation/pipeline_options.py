"""Options of `generate` and `chat` for a target worker instead of a server."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud.commands.options import Arguments

if TYPE_CHECKING:
    from tinkercloud.speculative.pipeline.orchestrator import Orchestrator


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("over workers on other machines, without a server")
    group.add_argument("--target", metavar="HOST:PORT", help="a target-worker")
    group.add_argument(
        "--draft", default="", metavar="HOST:PORT", help="a draft-worker; several with commas"
    )
    group.add_argument("--drafted", type=int, default=8, help="tokens of a round [8]")
    group.add_argument(
        "--branches", type=int, default=1, help="drafts that are verified together, as a tree [1]"
    )
    group.add_argument("--max-rounds", type=int, help="of an output")
    group.add_argument(
        "--draft-wait-ms", type=float, default=50.0, help="for the drafts of a round [50]"
    )
    group.add_argument(
        "--round-timeout-s", type=float, default=60.0, help="for the target's answer [60]"
    )
    group.add_argument("--key-file", type=Path, help="holds the key of the workers")
    group.add_argument("--ca-file", type=Path, help="PEM; who signed the workers' certificates")
    group.add_argument(
        "--telemetry", type=Path, metavar="FILE", help="JSON with all rounds, and a Chrome trace"
    )


def orchestrator_of(arguments: Arguments) -> "Orchestrator":
    """Raises ConfigError."""
    from tinkercloud.speculative.pipeline.options import PipelineOptions
    from tinkercloud.speculative.pipeline.orchestrator import Orchestrator
    from tinkercloud.speculative.remote.connection import ClientSecurity

    temperature, top_p = arguments["temperature"], arguments["top_p"]
    options = PipelineOptions(
        max_tokens=arguments["max_tokens"], max_rounds=arguments["max_rounds"],
        drafted=arguments["drafted"], branches=arguments["branches"],
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p, seed=arguments["seed"],
        draft_wait_s=arguments["draft_wait_ms"] / 1e3,
        round_timeout_s=arguments["round_timeout_s"],
    )  # fmt: skip
    security = ClientSecurity(arguments["key_file"], arguments["ca_file"])
    return Orchestrator(arguments["target"], arguments["draft"], options, security)
