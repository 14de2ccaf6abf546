"""`tinkercloud draft`: its options; `draft` does the work, and needs torch."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud.commands.options import Arguments, add_settings, config_of, say, with_models
from tinkercloud.errors import ConfigError

if TYPE_CHECKING:
    from tinkercloud.commands.drafts.target import TargetOptions

SETTINGS = ("data_dir", "models", "dtype", "speculate", "engine.threads")
LEARNING = (
    *("draft.tokens", "draft.acceptance", "draft.least_cases", "draft.replay_share"),
    *("draft.rank", "draft.rate"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Arguments], int], text: str, settings: Sequence[str] = SETTINGS
    ) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text)
        add_settings(parser, settings)
        parser.set_defaults(run=run)
        return parser

    status = command("status", _status, "the draft in use, and how many of its tokens are accepted")
    status.add_argument("--plot", type=Path, help="draw acceptance over time to this PNG")
    command("list", _list, "the drafts of the model, and what they are worth")
    learning = (*SETTINGS, *LEARNING)
    collect = command(
        "collect", _collect, "sample, and keep where the best draft was wrong", learning
    )
    collect.add_argument("--export", type=Path, help="write all cases here too (JSON lines)")
    train = command(
        "train", _train, "finetune the best draft on collected cases; without, make one", learning
    )
    train.add_argument("--minutes", type=float, default=15.0, help="of training at most [15]")
    train.add_argument("--anew", action="store_true", help="make one though there is one")
    evaluate = command(
        "evaluate", _evaluate, "the target alone, and drafts, on the same samples", learning
    )
    evaluate.add_argument("name", nargs="*", help="drafts, as `draft list` shows them [best]")
    for each, samples, tokens in ((collect, 4, 64), (train, 16, 96), (evaluate, 2, 64)):
        _add_samples(each, samples, tokens)
    use = command("use", _use, "draft with this one; a server that runs takes it up")
    use.add_argument("name", help="as `draft list` shows it, or latest")
    command("rollback", _rollback, "back to the draft before the best one")
    export = command("export", _export, "a draft model's adapter as PEFT's files, or MLX-LM's")
    export.add_argument("folder", type=Path)
    export.add_argument("--name", default="best", help="as `draft list` shows it [best]")
    export.add_argument("--mlx", action="store_true", help="MLX-LM's files")
    take = command("import", _import, "an adapter of the draft model becomes its best draft")
    take.add_argument("folder", type=Path, help="of PEFT or MLX-LM")


def _add_samples(parser: argparse.ArgumentParser, samples: int, tokens: int) -> None:
    parser.add_argument("--prompts", type=Path, help="a file, one prompt on each line")
    parser.add_argument("--raw", action="store_true", help="prompts without the chat template")
    parser.add_argument(
        "--weights", help="of the target: an adapter's or checkpoint's folder, or tinker://..."
    )
    parser.add_argument("--samples", type=int, default=samples, help=f"of each [{samples}]")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of a sample [{tokens}]")


def _status(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft

    for line in draft.status(with_models(config_of(arguments)), arguments["plot"]):
        say(line)
    return 0


def _list(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft

    for line in draft.listed(with_models(config_of(arguments))):
        say(line)
    return 0


def _collect(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import collect, draft

    config = with_models(config_of(arguments))
    sizes = collect.CollectConfig(*_sizes(arguments), draft_tokens=config.draft.tokens)
    options = draft.CollectOptions(_target(arguments), sizes, arguments["export"])
    draft.collect(config, options, say)
    return 0


def _evaluate(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import collect, draft

    config = with_models(config_of(arguments))
    samples, tokens = _sizes(arguments)
    sizes = collect.CollectConfig(samples, tokens, seed=2_000_000, draft_tokens=config.draft.tokens)
    options = draft.CollectOptions(_target(arguments), sizes)
    draft.evaluate(config, arguments["name"], options, say)
    return 0


def _train(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft, train

    if not arguments["minutes"] > 0:
        raise ConfigError("--minutes must be above 0")
    config = with_models(config_of(arguments))
    options = draft.TrainOptions(
        _target(arguments),
        train.DistillConfig.of(config.draft, _sizes(arguments), arguments["minutes"]),
        train.FinetuneConfig.of(config.draft, arguments["minutes"]),
        arguments["anew"],
    )
    draft.train(config, options, say)
    return 0


def _export(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft

    config = with_models(config_of(arguments))
    folder = arguments["folder"]
    version = draft.export(config, arguments["name"], folder, mlx=arguments["mlx"])
    say(f"{version} is in {folder}")
    return 0


def _import(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft

    version = draft.import_draft(with_models(config_of(arguments)), arguments["folder"])
    say(f"best is {version}")
    return 0


def _use(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft

    folder = draft.folder_of(with_models(config_of(arguments)))
    folder.use("best", arguments["name"])
    say(f"best is {folder.resolve('best')}")
    return 0


def _rollback(arguments: Arguments) -> int:
    from tinkercloud.commands.drafts import draft

    folder = draft.folder_of(with_models(config_of(arguments)))
    say(f"best is {folder.rollback('best')}")
    return 0


def _target(arguments: Arguments) -> "TargetOptions":
    from tinkercloud.commands.drafts.target import TargetOptions

    return TargetOptions(arguments["prompts"], arguments["raw"], arguments["weights"])


def _sizes(arguments: Arguments) -> tuple[int, int]:
    """Samples of each prompt, and tokens of each."""
    samples, tokens = arguments["samples"], arguments["tokens"]
    if samples < 1 or tokens < 4:
        raise ConfigError("--samples must be at least 1, --tokens 4")
    return samples, tokens
