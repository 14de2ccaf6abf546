"""Which drafter the engine's samples get, as `--speculate` names it."""

import logging
from pathlib import Path

from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.blocks import BlockPool
from tinkercloud.embedded.engine import Speculate
from tinkercloud.embedded.round_costs import round_costs
from tinkercloud.embedded.runners import Runner
from tinkercloud.embedded.speculation import Speculation
from tinkercloud.embedded.speculation_trace import Trace
from tinkercloud.speculative.drafter_table import drafter_table
from tinkercloud.speculative.guarded_drafter import guarded
from tinkercloud.speculative.planning import Knowledge
from tinkercloud.speculative.policy import Policy

logger = logging.getLogger(__name__)

AUTO = "suffix"


def speculate(asked: str, trace_to: Path | None, num_threads: int) -> Speculate | None:
    """None where it is off."""
    if asked == "off":
        return None
    named = AUTO if asked == "auto" else asked
    trace = Trace(trace_to) if trace_to is not None else None

    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation | None:
        if not runner.is_exact and asked == "auto":
            return None  # several rows of a sample may differ from one in their last bits
        if not runner.is_exact:
            logger.warning("on this device drafts may change the last bits of log-probabilities")
        vocab_size = base.config.vocab_size
        drafter = guarded(drafter_table(vocab_size).make(named), vocab_size)
        costs = round_costs(base, runner, pool, num_threads)
        return Speculation(drafter, Policy(Knowledge(costs)), trace)

    return make
