"""Speculative decoding over several machines, from a client: drafts from workers, a target worker
that verifies them."""

from tinkercloud.speculative.pipeline.conversation import ConversationSession
from tinkercloud.speculative.pipeline.loop import run_speculative_loop_async
from tinkercloud.speculative.pipeline.options import PipelineOptions
from tinkercloud.speculative.pipeline.orchestrator import Orchestrator
from tinkercloud.speculative.pipeline.result import PipelineResult, Round
from tinkercloud.speculative.remote.target_connection import TargetGone

__all__ = [
    "ConversationSession",
    "Orchestrator",
    "PipelineOptions",
    "PipelineResult",
    "Round",
    "TargetGone",
    "run_speculative_loop_async",
]
