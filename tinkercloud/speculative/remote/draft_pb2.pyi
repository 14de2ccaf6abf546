from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToWorker(_message.Message):
    __slots__ = ("hello", "round", "weights")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    round: Round
    weights: Weights
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class ToEngine(_message.Message):
    __slots__ = ("welcome", "refusal", "drafts")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    drafts: Drafts
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "model", "model_digest", "vocabulary_digest", "vocab_size", "tokenizer")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    model_digest: bytes
    vocabulary_digest: bytes
    vocab_size: int
    tokenizer: bytes
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., model_digest: _Optional[bytes] = ..., vocabulary_digest: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., tokenizer: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("drafter", "needs_tokenizer")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NEEDS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    needs_tokenizer: bool
    def __init__(self, drafter: _Optional[str] = ..., needs_tokenizer: bool = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("number", "begun", "deltas", "ended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    begun: _containers.RepeatedCompositeFieldContainer[Begin]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., begun: _Optional[_Iterable[_Union[Begin, _Mapping]]] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("digest", "piece", "is_last", "scale")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    piece: bytes
    is_last: bool
    scale: float
    def __init__(self, digest: _Optional[bytes] = ..., piece: _Optional[bytes] = ..., is_last: bool = ..., scale: _Optional[float] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("id", "group", "version", "epoch", "tokens", "num_prompt", "params", "sample_index", "salt")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    id: int
    group: bytes
    version: str
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_prompt: int
    params: Params
    sample_index: int
    salt: bytes
    def __init__(self, id: _Optional[int] = ..., group: _Optional[bytes] = ..., version: _Optional[str] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_prompt: _Optional[int] = ..., params: _Optional[_Union[Params, _Mapping]] = ..., sample_index: _Optional[int] = ..., salt: _Optional[bytes] = ...) -> None: ...

class Params(_message.Message):
    __slots__ = ("seed", "temperature", "top_k", "top_p", "min_p")
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    def __init__(self, seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("id", "length", "tokens", "max_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    def __init__(self, id: _Optional[int] = ..., length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("round", "branches", "forgotten")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    round: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    forgotten: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., forgotten: _Optional[_Iterable[int]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("id", "base", "tokens", "confidences")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    id: int
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    confidences: bytes
    def __init__(self, id: _Optional[int] = ..., base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., confidences: _Optional[bytes] = ...) -> None: ...
