"""`tinkercloud captures`: capture sessions of a running server, over its API."""

import argparse
import json
from typing import Any

from tinkercloud.commands.options import Arguments, complain, say


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="make a session and print an agent's base URLs")
    weights = create.add_mutually_exclusive_group(required=True)
    weights.add_argument("--model", help="a base model, a tinker:// path or a sampling session")
    weights.add_argument("--follow", help="a training run: its latest published weights")
    create.add_argument("--group", help="of trajectories that name none")
    create.add_argument("--webhook", help="a URL that is asked for rewards")
    listing = commands.add_parser("list", help="sessions, the newest first")
    get = commands.add_parser("get", help="a session and its trajectories, or its datums, as JSON")
    get.add_argument("--datums", metavar="LOSS", help="datums for this loss")
    reward = commands.add_parser("reward", help="a reward for all of a session, or part of it")
    target = reward.add_mutually_exclusive_group()
    for name in ("trajectory", "turn", "episode"):
        target.add_argument(f"--{name}")
    reward.add_argument("--group", help="of the episode")
    reward.add_argument("--key", default="", help="the same one replaces, other ones add")
    close = commands.add_parser("close", help="no more turns in a session or an episode")
    close.add_argument("--episode")
    close.add_argument("--group", help="of the episode")
    delete = commands.add_parser("delete", help="remove a session and all that it holds")
    for command in (get, reward, close, delete):
        command.add_argument("capture", help="as `captures list` shows it")
    reward.add_argument("value", type=float)
    runs = (
        *((create, _create), (listing, _list), (get, _get), (reward, _reward)),
        *((close, _close), (delete, _delete)),
    )
    for command, run in runs:
        command.add_argument("--base-url", help="the server; else TINKER_BASE_URL")
        command.add_argument("--api-key", help="its key; else TINKER_API_KEY")
        command.set_defaults(run=_reporting(run))


def _reporting(run: Any) -> Any:
    """What the server refuses ends the command with its text."""

    def reported(arguments: Arguments) -> int:
        from tinker_gmi.captures import Captures
        from tinker_gmi.connection.errors import TinkerError

        try:
            with Captures(arguments["base_url"], arguments["api_key"]) as captures:
                run(captures, arguments)
        except TinkerError as error:
            complain(error.message)
            return 1
        return 0

    return reported


def _create(captures: Any, arguments: Arguments) -> None:
    session = captures.create(**_not_empty(arguments, "model", "follow", "group", "webhook"))
    say(f"# {session['capture_id']}")
    say(f"export OPENAI_BASE_URL={session['openai_base_url']}")
    say(f"export ANTHROPIC_BASE_URL={session['anthropic_base_url']}")
    if "webhook_secret" in session:
        say(f"# webhook secret: {session['webhook_secret']}")


def _list(captures: Any, arguments: Arguments) -> None:
    for session in captures.list(limit=1000):
        state = "closed" if session["closed"] else "open"
        weights = session.get("model") or f"follows {session['follow']}"
        say(f"{session['capture_id']}  {session['num_turns']} turns  {state}  {weights}")


def _get(captures: Any, arguments: Arguments) -> None:
    session = captures.get(arguments["capture"])
    if arguments["datums"] is None:
        session["trajectories"] = captures.trajectories(arguments["capture"])
    else:
        session |= captures.datums(arguments["capture"], loss=arguments["datums"])
    say(json.dumps(session, indent=1, ensure_ascii=False))


def _reward(captures: Any, arguments: Arguments) -> None:
    target = _not_empty(arguments, "trajectory", "turn", "episode", "group", "key")
    done = captures.reward(arguments["capture"], arguments["value"], **target)
    say(f"{done['target']}  {done['value']:g}")


def _close(captures: Any, arguments: Arguments) -> None:
    captures.close_turns(arguments["capture"], **_not_empty(arguments, "episode", "group"))


def _delete(captures: Any, arguments: Arguments) -> None:
    captures.delete(arguments["capture"])


def _not_empty(arguments: Arguments, *names: str) -> dict[str, str]:
    return {name: arguments[name] for name in names if arguments[name]}
