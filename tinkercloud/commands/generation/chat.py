"""`tinkercloud chat`: talk with a base model or a checkpoint of a running server."""

import argparse
import sys

from tinkercloud.commands.generation.api_client import (
    add_sampling_options,
    chosen_model,
    opened,
    sampling_fields,
)
from tinkercloud.commands.generation.pipeline_options import add_pipeline_options, orchestrator_of
from tinkercloud.commands.generation.server_chat import ServerChat
from tinkercloud.commands.generation.worker_chat import WorkerChat
from tinkercloud.commands.options import Arguments, say


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sampling_options(parser)
    add_pipeline_options(parser)
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    if arguments["target"] is not None:
        with orchestrator_of(arguments) as pipeline, WorkerChat.of(pipeline, arguments) as chat:
            say(f"[{pipeline.model}; /help]")
            while (line := _line()) and chat.handle(line):
                pass
        return 0
    with opened(arguments) as client:
        model = chosen_model(client, arguments["model"])
        chat = ServerChat(client, model, sampling_fields(arguments), arguments["system"])
        say(f"[{model}; /help]")
        while (line := _line()) and chat.handle(line):
            pass
    return 0


def _line() -> str:
    """Empty at the end of the input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    try:
        return input("> ") + "\n"
    except EOFError:
        say("")
        return ""
