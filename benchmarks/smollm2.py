"""The real weights that the benchmarks run on."""

import sys
from pathlib import Path

from tinkercloud.fetch import find_model

ROOT = Path(__file__).resolve().parent.parent


def weights() -> Path:
    """SmolLM2-135M-Instruct as GGUF; ends the program with what to do where it is not here."""
    found = find_model("smollm2") or find_model("smollm2", ROOT / ".tinkercloud")
    if found is None:
        sys.exit("the SmolLM2 weights are not here; run `make install`")
    return found
