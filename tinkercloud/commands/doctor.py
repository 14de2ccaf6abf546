"""`tinkercloud doctor`: whether the backend in use can run here, and what to do where it cannot."""

import argparse
import json
import shutil

from tinkercloud.commands.options import Arguments, add_settings, check_backend, config_of, say
from tinkercloud.config import nccl_variables


def add_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--all", action="store_true", help="every check, and what can run here")
    output.add_argument("--json", action="store_true", help="the same, for programs")
    add_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    """The exit status: 0 where the backend can run, else 1."""
    from tinkercloud.doctor import diagnosis as doctor
    from tinkercloud.doctor import report
    from tinkercloud.doctor.capabilities import capabilities
    from tinkercloud.doctor.facts import gather
    from tinkercloud.doctor.target import target_of

    config = config_of(arguments)
    check_backend(config)
    target = target_of(config, nccl_variables())
    if arguments["all"] or arguments["json"]:
        facts = gather(target, doctor.ALL_FACTS)
        diagnosis = doctor.diagnose(target, facts)
        abilities = capabilities(target, facts)
        if arguments["json"]:
            say(json.dumps(report.to_json(diagnosis, abilities), indent=1))
        else:
            say(report.full(diagnosis, abilities))
    else:
        checks = doctor.brief_checks(target.backend)
        diagnosis = doctor.diagnose(target, gather(target, doctor.facts_of(checks)), checks)
        say(report.brief(diagnosis, shutil.get_terminal_size((100, 24)).columns))
    return 0 if diagnosis.can_run else 1
