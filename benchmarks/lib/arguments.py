"""The command line that every benchmark has."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.lib.peers import PEERS

NOT_RECORDED = ("drafts", "json", "peers")
"""Options that do not change what is measured."""


class BenchmarkParser(argparse.ArgumentParser):
    """name: of the module in benchmarks/. quick: what the small form leaves; "" where there is
    none."""

    def __init__(self, name: str, doc: str | None, quick: str = ""):
        summary = (doc or "").partition("\n\n")[0]
        super().__init__(prog=f"python -m benchmarks.{name}", description=summary)
        self.add_argument("--json", type=Path, help="write the result here")
        if quick:
            self.add_argument("--quick", action="store_true", help=quick)

    def add_peers(self, contenders: Iterable[str]) -> None:
        """contenders: the short names that --only takes."""
        self.add_argument(
            "--peers", type=Path, default=PEERS, help="the peers' environments (peers.md)"
        )
        self.add_argument("--only", help=f"contenders, of {','.join(contenders)}")

    def command(self, options: argparse.Namespace) -> str:
        """What measures the same again: every option that is not the default."""
        defaults = vars(self.parse_args([]))
        words = [self.prog]
        for name, value in vars(options).items():
            if value == defaults[name] or name in NOT_RECORDED:
                continue
            if isinstance(value, list):  # positional arguments
                words += value
            else:
                flag = f"--{name.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        return " ".join(words)
