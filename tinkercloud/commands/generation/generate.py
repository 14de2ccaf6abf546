"""`tinkercloud generate`: a text continued by a running server, written as it comes."""

import argparse
import sys

from tinkercloud.commands.generation.api_client import (
    Answer,
    add_sampling_options,
    chosen_model,
    opened,
    sampling_fields,
    shown,
)
from tinkercloud.commands.generation.draft_counts import read_counts
from tinkercloud.commands.generation.pipeline_options import add_pipeline_options, orchestrator_of
from tinkercloud.commands.generation.server_chat import stats_line
from tinkercloud.commands.options import Arguments, say_progress


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text; -: from the standard input")
    parser.add_argument("--chat", action="store_true", help="a message to answer, not to continue")
    parser.add_argument("--stats", action="store_true", help="tokens, speed and drafts, at the end")
    add_sampling_options(parser)
    add_pipeline_options(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    prompt = sys.stdin.read() if arguments["prompt"] == "-" else arguments["prompt"]
    if arguments["target"] is not None:
        _over_workers(arguments, prompt)
        return 0
    with opened(arguments) as client:
        fields = sampling_fields(arguments)
        fields["model"] = chosen_model(client, arguments["model"])
        if arguments["chat"]:
            path = "chat/completions"
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            path, fields["prompt"] = "completions", prompt
        before = read_counts(client) if arguments["stats"] else None
        answer = Answer()
        for piece in client.stream(path, fields, answer):
            _write(piece)
        _write("\n")
        if arguments["stats"]:
            say_progress(stats_line(answer, before, read_counts(client)))
    return 0


def _over_workers(arguments: Arguments, prompt: str) -> None:
    with orchestrator_of(arguments) as pipeline:
        try:
            if arguments["chat"]:
                with pipeline.chat_session() as session:
                    session.generate(prompt, _write)
            else:
                pipeline.run_with_result_sync(prompt, _write)
            _write("\n")
            if arguments["stats"]:
                say_progress(pipeline.results[-1].summary)
        finally:
            if arguments["telemetry"] is not None:
                pipeline.export_telemetry(arguments["telemetry"])


def _write(piece: str) -> None:
    """A file gets the text as it is."""
    sys.stdout.write(shown(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()
