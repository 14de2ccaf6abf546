"""A server, a real model, and two ways to teach it, in one go: `make demo`.

Starts `tinkercloud serve` on a free port with data of its own, then runs sft.py and rl.py against
it through the official `tinker` client, and leaves a picture of both curves.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lib import interrupts
from lib.options import MODEL, RecipeError

START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
LOG = "server.log"  # in a server's folder
TITLE = "SmolLM2-135M-Instruct on this machine, trained over the Tinker API"

# Before the client is imported, which reads them then: nothing leaves this machine.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "TINKER_TELEMETRY": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Running:
    """A server of this process, with data of its own in `scratch`; `with` ends it."""

    scratch: Path
    weights: Path
    process: "subprocess.Popen[bytes]"
    base_url: str = ""
    api_key: str = ""
    has_ended: bool = False
    _changing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, scratch: Path, weights: Path) -> "Running":
        """Raises RecipeError, Interrupted."""
        running = cls(scratch, weights, launch(scratch, weights))
        try:
            running.base_url, running.api_key = await_ready(running.process, scratch / LOG)
        except BaseException as error:  # nothing of it may be left behind
            stop(running.process)
            if isinstance(error, RecipeError):
                lines = tail(scratch / LOG)
                raise RecipeError(f"{error}\nThe server's last lines:\n{lines}") from error
            raise
        return running

    def kill(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait()

    def restart(self) -> None:
        """On the same port and data, unless it has ended; in any thread. Returns at once."""
        port = int(self.base_url.rpartition(":")[2])
        with self._changing:
            if not self.has_ended:
                self.process = launch(self.scratch, self.weights, port)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self.has_ended = True
            stop(self.process)


def main() -> int:
    args = _parser().parse_args()
    interrupts.remember_signals()
    start_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="tinkercloud-demo-") as scratch:
            weights = fetch_model()
            with Running.start(Path(scratch), weights) as server:
                print(f"serving at {server.base_url}", flush=True)
                picture = interrupts.run(lambda: teach(server, args))
    except interrupts.Interrupted as ended:
        print("\nstopped", file=sys.stderr)
        return ended.status
    except RecipeError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    print(f"\ndone in {time.monotonic() - start_s:.0f} s; both curves: {picture}")
    print(farewell())
    return 0


def end_process(status: int) -> NoReturn:
    """Ends this process without Python's own end.

    The official client's threads belong to a library that is not Python's. One that wants to call
    Python while the interpreter ends is ended by it in the middle, and then aborts the process: a
    demo that was interrupted well would say with its status that it had crashed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Watch a model learn.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=8)
    parser.add_argument("--rl-steps", type=int, default=10)
    return parser


def teach(server: Running, args: argparse.Namespace) -> Path:
    """Both recipes by the official client, as their commands would run them; the picture's path."""
    import rl
    import sft
    import tinker
    from lib import plot

    common = ["--sdk", "tinker", "--base-url", server.base_url, "--api-key", server.api_key]
    common += ["--seed", str(args.seed)]
    try:
        heading("1. Supervised fine-tuning: one-digit sums, answered as JSON")
        first = sft.run(sft.parser().parse_args([*common, "--steps", str(args.sft_steps)]))
        heading("2. Reinforcement learning: which of two numbers is larger, by reward")
        options = [first.state_path, *common, "--steps", str(args.rl_steps)]
        second = rl.run(rl.parser().parse_args(options))
    except tinker.TinkerError as error:
        lines = tail(server.scratch / LOG)
        raise RecipeError(
            f"the server refused or was lost: {error}\nThe server's last lines:\n{lines}"
        ) from error
    for run in (first, second):
        run.save(args.out)
    return plot.draw(args.out / "demo.png", [first, second], TITLE).absolute()


def fetch_model() -> Path:
    """The weights' path; fetched when they are not here, which the server would do as well.
    Raises RecipeError, Interrupted."""
    command = [sys.executable, "-m", "tinkercloud", "fetch", "smollm2"]
    status, said = interrupts.output_of(command)
    match = re.search(r"^(.*) is here and whole$", said, re.M)
    if status != 0 or match is None:
        raise RecipeError(said.strip() or "the weights could not be fetched")
    return Path(match[1])


def launch(scratch: Path, weights: Path, port: int = 0) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tinkercloud", "serve", "--port", str(port)]
    command += ["--data-dir", str(scratch / "data"), "--model", f"{MODEL}={weights}"]
    # Settings of the user's own server must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINKERCLOUD_")}
    print(f"starting a server for {MODEL} ...", flush=True)
    with (scratch / LOG).open("wb") as sink:
        # In a session of its own, so that Ctrl-C reaches only this process, which then ends it.
        return subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def await_ready(process: "subprocess.Popen[bytes]", log: Path) -> tuple[str, str]:
    """Its URL and its first key. Raises RecipeError, Interrupted."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        interrupts.check()
        written = log.read_text(errors="replace")
        url = re.search(r"^ready: (http://\S+)", written, re.M)
        key = re.search(r"^export TINKER_API_KEY=(\S+)", written, re.M)
        if url and key:
            return url[1], key[1]
        if process.poll() is not None:
            raise RecipeError(f"the server ended with status {process.returncode}")
        if time.monotonic() > deadline_s:
            raise RecipeError(f"the server was not ready after {START_LIMIT_S:.0f} s")
        time.sleep(0.1)


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def heading(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}", flush=True)


def farewell() -> str:
    command = Path(sys.executable).parent / "tinkercloud"
    shown = command if command.is_file() else f"{sys.executable} -m tinkercloud"
    return f"""
Your own scripts, written for `tinker`, run on your own server:

  {shown} serve

It prints the two lines that point them at it, the key on its first start:

  export TINKER_BASE_URL=http://127.0.0.1:8700
  export TINKER_API_KEY=tml-..."""


if __name__ == "__main__":
    end_process(main())
