from tinkercloud.speculative.remote import draft_pb2 as _draft_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToTarget(_message.Message):
    __slots__ = ("hello", "open", "verify", "end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    verify: Verify
    end: End
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class FromTarget(_message.Message):
    __slots__ = ("welcome", "refusal", "verdict", "failure")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    verdict: Verdict
    failure: Failure
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "needs_tokenizer")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEEDS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    needs_tokenizer: bool
    def __init__(self, protocol: _Optional[int] = ..., needs_tokenizer: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("model", "model_digest", "vocabulary_digest", "vocab_size", "tokenizer")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: bytes
    vocabulary_digest: bytes
    vocab_size: int
    tokenizer: _containers.RepeatedCompositeFieldContainer[File]
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[bytes] = ..., vocabulary_digest: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., tokenizer: _Optional[_Iterable[_Union[File, _Mapping]]] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("id", "params")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    id: int
    params: _draft_pb2.Params
    def __init__(self, id: _Optional[int] = ..., params: _Optional[_Union[_draft_pb2.Params, _Mapping]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("id", "number", "length", "tokens", "drafted", "parents", "max_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    number: int
    length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    def __init__(self, id: _Optional[int] = ..., number: _Optional[int] = ..., length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("id", "number", "tokens", "logprobs", "num_accepted", "has_stopped", "num_cached")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HAS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    id: int
    number: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_accepted: int
    has_stopped: bool
    num_cached: int
    def __init__(self, id: _Optional[int] = ..., number: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., num_accepted: _Optional[int] = ..., has_stopped: bool = ..., num_cached: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("id", "number", "reason", "is_gone")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    id: int
    number: int
    reason: str
    is_gone: bool
    def __init__(self, id: _Optional[int] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ..., is_gone: bool = ...) -> None: ...
