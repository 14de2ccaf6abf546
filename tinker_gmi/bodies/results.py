"""Results of training and sampling.

On the wire these two are protobuf (specification 6.3, 9.3); the JSON form serves curl and older
SDKs. Axes: N tokens of a datum, P prompt tokens, S sampled tokens.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tinker_gmi.bodies.tensors import TensorData
from tinker_gmi.bodies.wire_model import WireModel

StopReason = Literal["length", "stop"]
LossFnOutput = dict[str, TensorData]
TopkRow = list[tuple[int, float]]
"""(token id, log-probability) of the likeliest tokens of one position, best first."""


class ForwardBackwardOutput(WireModel):
    """loss_fn_outputs[i] belongs to datum i: `logprobs`, shaped like its target_tokens, and the
    other outputs of the loss. metrics: `loss:sum` and others, named `quantity:reduction`."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = Field(default_factory=dict)


class SampledSequence(WireModel):
    """tokens (S,) with the stop token; logprobs (S,) under the distribution sampled from."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None = None
    topk_logprobs: list[TopkRow | None] | None = None
    sequence_id: str = ""

    @property
    def tokens_np(self) -> NDArray[np.int32]:
        return np.asarray(self.tokens, dtype=np.int32)

    @property
    def logprobs_np(self) -> NDArray[np.float32] | None:
        return None if self.logprobs is None else np.asarray(self.logprobs, dtype=np.float32)


class PromptAltTokens(WireModel):
    """tokens and logprobs (P-1, k): row i has k draws, at the request's temperature, in place of
    prompt token i + 1."""

    tokens: TensorData
    logprobs: TensorData


class SampleResponse(WireModel):
    """prompt_logprobs (P,): None where not scored (always at 0). topk_prompt_logprobs: a row for
    each prompt token, None where not scored. target_prompt_logprobs: shaped like the request's."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[TopkRow | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    type: Literal["sample"] = "sample"

    @property
    def prompt_logprobs_np(self) -> NDArray[np.float32] | None:
        """NaN where not scored."""
        if self.prompt_logprobs is None:
            return None
        return np.asarray(self.prompt_logprobs, dtype=np.float32)
