"""What the router's process runs: SGLang's router, with a key that its command does not show.

`python -m tinkercloud.cluster.rollout.router_process OPTIONS OF sglang_router.launch_router`.
"""

# pyright: reportMissingTypeStubs=false

import sys

from tinkercloud.config import engine_key


def main() -> None:
    from sglang_router.launch_router import main as launch

    key = engine_key()
    if key is not None:
        sys.argv.append(f"--api-key={key}")  # as one word: a key may begin with a dash
    launch()


if __name__ == "__main__":
    main()
