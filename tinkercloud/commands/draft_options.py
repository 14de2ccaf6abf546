"""`tinkercloud draft`: its options; `draft` does the work, and needs torch."""

import argparse
from pathlib import Path

from tinkercloud.commands.options import Arguments, add_settings, config_of, say, with_models
from tinkercloud.errors import ConfigError

SETTINGS = ("data_dir", "models", "dtype", "engine.threads")


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status", help="the draft in use, and how many of its tokens are accepted"
    )
    status.add_argument("--plot", type=Path, help="draw acceptance over time to this PNG")
    listing = commands.add_parser("list", help="the drafts of the model, and what they are worth")
    collect = commands.add_parser("collect", help="sample, and keep where the best draft was wrong")
    collect.add_argument("--export", type=Path, help="write all cases here too (JSON lines)")
    train = commands.add_parser(
        "train", help="finetune the best head on collected cases; without, make one from samples"
    )
    train.add_argument("--minutes", type=float, default=15.0, help="of training at most [15]")
    train.add_argument("--anew", action="store_true", help="make one though there is one")
    evaluate = commands.add_parser("evaluate", help="acceptance of drafts on the same samples")
    evaluate.add_argument("name", nargs="*", help="drafts, as `draft list` shows them [best]")
    for command, samples, tokens in ((collect, 4, 64), (train, 16, 96), (evaluate, 2, 64)):
        command.add_argument("--prompts", type=Path, help="a file, one prompt on each line")
        command.add_argument("--samples", type=int, default=samples, help=f"of each [{samples}]")
        command.add_argument("--tokens", type=int, default=tokens, help=f"of a sample [{tokens}]")
    use = commands.add_parser("use", help="draft with this one; a server that runs takes it up")
    use.add_argument("name", help="as `draft list` shows it, or latest")
    back = commands.add_parser("rollback", help="back to the draft before the best one")
    for command, run in (
        (status, _status),
        (listing, _list),
        (collect, _collect),
        (train, _train),
        (evaluate, _evaluate),
        (use, _use),
        (back, _rollback),
    ):
        add_settings(command, SETTINGS)
        command.set_defaults(run=run)


def _status(arguments: Arguments) -> int:
    from tinkercloud.commands import draft

    for line in draft.status(with_models(config_of(arguments)), arguments["plot"]):
        say(line)
    return 0


def _list(arguments: Arguments) -> int:
    from tinkercloud.commands import draft

    for line in draft.listed(with_models(config_of(arguments))):
        say(line)
    return 0


def _collect(arguments: Arguments) -> int:
    from tinkercloud.commands import draft, draft_collect

    samples = draft_collect.CollectConfig(*_sizes(arguments))
    options = draft.CollectOptions(arguments["prompts"], samples, arguments["export"])
    draft.collect(with_models(config_of(arguments)), options, say)
    return 0


def _evaluate(arguments: Arguments) -> int:
    from tinkercloud.commands import draft, draft_collect

    samples = draft_collect.CollectConfig(*_sizes(arguments), seed=2_000_000)
    options = draft.CollectOptions(arguments["prompts"], samples)
    draft.evaluate(with_models(config_of(arguments)), arguments["name"], options, say)
    return 0


def _train(arguments: Arguments) -> int:
    from tinkercloud.commands import draft, draft_train

    if not arguments["minutes"] > 0:
        raise ConfigError("--minutes must be above 0")
    samples = draft_train.DistillConfig(*_sizes(arguments), minutes=arguments["minutes"])
    options = draft.TrainOptions(arguments["prompts"], samples, arguments["anew"])
    draft.train(with_models(config_of(arguments)), options, say)
    return 0


def _use(arguments: Arguments) -> int:
    from tinkercloud.commands import draft

    folder = draft.folder_of(with_models(config_of(arguments)))
    folder.use("best", arguments["name"])
    say(f"best is {folder.resolve('best')}")
    return 0


def _rollback(arguments: Arguments) -> int:
    from tinkercloud.commands import draft

    folder = draft.folder_of(with_models(config_of(arguments)))
    say(f"best is {folder.rollback('best')}")
    return 0


def _sizes(arguments: Arguments) -> tuple[int, int]:
    """Samples of each prompt, and tokens of each."""
    samples, tokens = arguments["samples"], arguments["tokens"]
    if samples < 1 or tokens < 4:
        raise ConfigError("--samples must be at least 1, --tokens 4")
    return samples, tokens
