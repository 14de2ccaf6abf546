"""Internal types: what services hand to backends and get back. numpy only, no torch.

Axes: N tokens of a datum, K alternative targets, P prompt tokens, S sampled tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

StopReason = Literal["stop", "length"]

LORA_ALPHA = 32.0
"""Fixed, as in the hosted service's published recipe: W' = W + (alpha / rank) B A."""


FLOAT32_BYTES = 4
STATE_BYTES = 4 * FLOAT32_BYTES
"""Of a number in training: itself, its gradient, and Adam's two moments."""
DTYPE_BYTES = {"bfloat16": 2, "float32": FLOAT32_BYTES}


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """How many numbers an adapter of rank 1 has: a matrix of (out, in) that it sits on gives out +
    in. Experts share a rank among the top_k that a token meets."""

    attention: int = 0
    mlp: int = 0
    unembed: int = 0
    experts: int = 0
    top_k: int = 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model that the backend offers."""

    name: str
    architecture: str  # "llama", "qwen2", "qwen3"
    max_context_length: int  # tokens
    vocab_size: int
    num_parameters: int
    tokenizer_path: Path | None  # a Hugging Face tokenizer folder; None where there is none (fake)
    eos_token_ids: tuple[int, ...]
    dtype: str  # "float32" | "bfloat16"
    # Its config.json, for exports of full weights; None where there is none (fake).
    hf_config: Mapping[str, Any] | None = field(default=None, hash=False)
    adapter_sizes: AdapterSizes = AdapterSizes()

    def training_bytes(self, spec: "LoraSpec") -> int:
        """What a model in training takes beside its base model."""
        num = num_trained(spec, self.num_parameters, self.adapter_sizes)
        return training_bytes(spec, num, DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """rank 0 means full-parameter training (the other fields are then without effect)."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA


def num_trained(spec: LoraSpec, num_parameters: int, sizes: AdapterSizes) -> int:
    """How many numbers training changes: all, or those of the adapter."""
    if spec.rank == 0:
        return num_parameters
    num = spec.train_attn * sizes.attention + spec.train_unembed * sizes.unembed
    num = spec.rank * (num + spec.train_mlp * sizes.mlp)
    return num + spec.train_mlp * max(1, spec.rank // sizes.top_k) * sizes.experts


def training_bytes(spec: LoraSpec, num_trained: int, weight_bytes: int) -> int:
    """Of the state of a model, and of the copy of full weights that passes read. weight_bytes: of a
    number of the base model."""
    return num_trained * (STATE_BYTES + (0 if spec.rank else weight_bytes))


@dataclass(frozen=True, slots=True)
class StateCost:
    """Of a copy of a model's state: its size as files, how long the model's operations waited for
    it, and how long it was written aside."""

    num_bytes: int
    copy_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence.

    tokens: int32 (N,). inputs: `target_tokens` int64 (N,) or (N, K); the other keys float32, each
    of the shape that its loss asks for. Position i of `tokens` predicts `target_tokens[i]`.
    """

    tokens: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """A run of a datum's positions and what it reproduces: tokens [offset, offset + length) of the
    prompt, or of the sampled tokens, of the sequence that a sample named (wire specification,
    section 7.8)."""

    kind: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """What is kept of one sampled sequence. prompt int32 (P,). tokens int32 (S,) and logprobs
    float32 (S,): as in SampledSequence."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Checked input of forward_backward; loss_fn is a key of `LOSSES`, its config complete, or
    "custom": then custom_loss is the loss as JSON (`losses.custom.graph`), and the inputs are those
    that it declares. user: whose model trains; the engine shares its time between users."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict[str, float])
    forward_only: bool = False
    custom_loss: str = ""
    user: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, slots=True)
class TrainOutput:
    """outputs[i] belongs to data[i]: `logprobs` float32 shaped like its target_tokens, for
    cross_entropy `elementwise_loss`, and each metric of a custom loss (1,) by its name.

    metrics: `loss:sum` and others with exactly one colon."""

    outputs: tuple[Mapping[str, NDArray[np.float32]], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Defaults of the wire specification, section 8."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """max_tokens None: up to the context limit. seed None was replaced by a drawn one before this.

    Penalties change the logits of tokens that the sample has already, before temperature, at
    temperature 0 too. After temperature come top_k, then top_p, then min_p: it leaves tokens with
    at least so much of the likeliest one's probability. stop_strings / stop_token_ids: from the
    request. use_eos: False only for the explicit `stop=[]`.
    top_k -1: no limit. temperature 0: greedy, ties to the lowest id.
    """

    max_tokens: int | None
    seed: int  # 0 <= seed < 2**64
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    use_eos: bool = True

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sample's text must be. json_schema: a JSON document of this schema; regex: a match of
    this expression; choice: one of the strings of this JSON list. text: at most
    MAX_GRAMMAR_CHARACTERS."""

    kind: Literal["json_schema", "regex", "choice"]
    text: str


MAX_GRAMMAR_CHARACTERS = 2**16


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """prompt int32 (P,), P >= 1. prompt_logprobs_last_n None: all. *_k 0: not wanted.
    target_prompt_logprobs int64 (P-1, K), -1 = skip; row i scores position i+1. speculate: False
    for a sample without drafts. grammar: what the sample's text must be; end-of-sequence tokens
    come where it is complete, and a sample that ends by max_tokens may be a beginning.
    prompt_alt_tokens: draws for each position of the prompt. cache_salt: only requests with the
    same one share what is kept of prompts and samples (keys and values, text for drafts). user: who
    asks; the engine shares its time between users. details_for: the session whose samples tell
    where their drafts were wrong; "" for none. drafted: how the caller expects the one sample to
    go on; a backend may verify it in one pass, and end the sample with its first other token.
    needs_logprobs: False where nobody reads those of the samples: a backend that would have to do
    more for them may leave them NaN."""

    prompt: NDArray[np.int32]
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: NDArray[np.int64] | None = None
    speculate: bool = True
    details_for: str = ""
    grammar: Grammar | None = None
    prompt_alt_tokens: int = 0
    cache_salt: str = ""
    user: str = ""
    drafted: tuple[int, ...] = ()
    needs_logprobs: bool = True

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is wanted of the prompt's tokens, not of the samples alone."""
        return (
            self.prompt_logprobs
            or self.topk_prompt_logprobs > 0
            or self.target_prompt_logprobs is not None
            or self.prompt_alt_tokens > 0
        )


@dataclass(frozen=True, slots=True)
class Topk:
    """token_ids int32 (length, k), logprobs float32 (length, k); unscored rows: 0 / -99999.0."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """tokens int64 (P-1, k), logprobs float32 (P-1, k). Row i has independent draws, with
    replacement, at the request's temperature from what the model says of prompt token i + 1; their
    log-probabilities are the model's, at temperature 1."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """tokens int32 (S,) with the stop token; logprobs float32 (S,) under the distribution that they
    were drawn from."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: StopReason
    topk: Topk | None = None


def num_equal(first: Iterable[object], second: Iterable[object]) -> int:
    """How many tokens two sequences begin with alike."""
    return sum(1 for _ in takewhile(bool, map(eq, first, second)))


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """prompt_logprobs float32 (P,), NaN where not scored (always at 0).
    target_prompt_logprobs float32 (P-1, K), 0.0 where -1 was asked."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: NDArray[np.float32] | None = None
    topk_prompt_logprobs: Topk | None = None
    target_prompt_logprobs: NDArray[np.float32] | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        topks = [self.topk_prompt_logprobs, *(sequence.topk for sequence in self.sequences)]
        alternatives = self.prompt_alt_tokens
        arrays = [
            *(array for s in self.sequences for array in (s.tokens, s.logprobs)),
            *(array for t in topks if t is not None for array in (t.token_ids, t.logprobs)),
            *(() if alternatives is None else (alternatives.tokens, alternatives.logprobs)),
            *(a for a in (self.prompt_logprobs, self.target_prompt_logprobs) if a is not None),
        ]
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one sample as they are drawn.

    tokens int32 (n,), logprobs float32 (n,), n >= 1; topk of length n where it was asked for.
    stop_reason: None but in a sample's last chunk.
    """

    sample_index: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: StopReason | None = None
    topk: Topk | None = None


OnTokens = Callable[[TokenChunk], None]
"""Takes the chunks of all samples of a request, those of one sample in order. It is called on the
event loop, must not block and must not raise."""


@dataclass(frozen=True, slots=True)
class FromBase:
    """Publish the untouched base model."""

    base_model: str


@dataclass(frozen=True, slots=True)
class FromModel:
    """Publish a model's weights as they are after all operations so far."""

    model_id: str


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Publish what a checkpoint folder holds."""

    base_model: str
    directory: Path


WeightsSource = FromBase | FromModel | FromCheckpoint
