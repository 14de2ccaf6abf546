"""`tinkercloud doctor`: whether the backend in use can run here."""

import argparse
import json
import os

from tinkercloud.commands.options import Arguments, add_settings, check_backend, config_of, say


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    add_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinkercloud.doctor import report as doctor

    config = config_of(arguments)
    check_backend(config)
    target = doctor.target_of(config, os.environ)
    diagnosis = doctor.diagnose(target, doctor.ask(target))
    say(
        json.dumps(diagnosis.to_json(), indent=1) if arguments["json"] else doctor.report(diagnosis)
    )
    return 0 if diagnosis.can_run else 1
