from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Up(_message.Message):
    __slots__ = ("hello", "open", "draft", "close", "ahead")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    draft: DraftTokens
    close: Close
    ahead: DraftAhead
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[DraftTokens, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., ahead: _Optional[_Union[DraftAhead, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "tokenizer_digest", "model_name", "max_draft_tokens", "takes_assignments")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    tokenizer_digest: str
    model_name: str
    max_draft_tokens: int
    takes_assignments: bool
    def __init__(self, protocol_version: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., model_name: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., takes_assignments: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "ratio")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ratio: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., ratio: bool = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "max_tokens", "stop_token_ids", "sampling", "num_logprobs", "expected_output_tokens", "tpot", "deadline", "stop")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    num_logprobs: int
    expected_output_tokens: int
    tpot: float
    deadline: float
    stop: StopStrings
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_logprobs: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., tpot: _Optional[float] = ..., deadline: _Optional[float] = ..., stop: _Optional[_Union[StopStrings, _Mapping]] = ...) -> None: ...

class StopStrings(_message.Message):
    __slots__ = ("strings", "previous", "shown_token_ids", "num_made")
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_MADE_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    previous: int
    shown_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_made: int
    def __init__(self, strings: _Optional[_Iterable[str]] = ..., previous: _Optional[int] = ..., shown_token_ids: _Optional[_Iterable[int]] = ..., num_made: _Optional[int] = ...) -> None: ...

class DraftTokens(_message.Message):
    __slots__ = ("request_id", "epoch", "round", "prefix_len", "prefix_digest", "token_ids", "weights")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    round: int
    prefix_len: int
    prefix_digest: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedCompositeFieldContainer[Distribution]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., prefix_len: _Optional[int] = ..., prefix_digest: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[_Union[Distribution, _Mapping]]] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftAhead(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[Lines]
    def __init__(self, lines: _Optional[_Iterable[_Union[Lines, _Mapping]]] = ...) -> None: ...

class Lines(_message.Message):
    __slots__ = ("request_id", "pieces")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pieces: _containers.RepeatedCompositeFieldContainer[LinePiece]
    def __init__(self, request_id: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[LinePiece, _Mapping]]] = ...) -> None: ...

class LinePiece(_message.Message):
    __slots__ = ("line", "start", "token_ids", "parent")
    LINE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    line: int
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent: int
    def __init__(self, line: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parent: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Down(_message.Message):
    __slots__ = ("welcome", "opened", "assign", "verdict", "release", "refused")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    opened: Opened
    assign: Assign
    verdict: VerifiedTokens
    release: Release
    refused: Refused
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., verdict: _Optional[_Union[VerifiedTokens, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "drafter", "vocab_size", "max_draft_tokens", "max_open_requests", "max_request_tokens", "max_message_bytes", "weight_sum", "max_weights", "trusted", "target", "eos_token_ids", "max_ahead_tokens")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SUM_FIELD_NUMBER: _ClassVar[int]
    MAX_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    drafter: str
    vocab_size: int
    max_draft_tokens: int
    max_open_requests: int
    max_request_tokens: int
    max_message_bytes: int
    weight_sum: int
    max_weights: int
    trusted: bool
    target: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_ahead_tokens: int
    def __init__(self, protocol_version: _Optional[int] = ..., drafter: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_open_requests: _Optional[int] = ..., max_request_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., weight_sum: _Optional[int] = ..., max_weights: _Optional[int] = ..., trusted: bool = ..., target: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_ahead_tokens: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("request_id", "epoch", "round", "prefix_len", "num_draft_tokens", "min_survival", "prefix_token_ids", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    round: int
    prefix_len: int
    num_draft_tokens: int
    min_survival: float
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., prefix_len: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., min_survival: _Optional[float] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class VerifiedTokens(_message.Message):
    __slots__ = ("request_id", "start", "token_ids", "num_accepted", "finish_reason", "reason", "logprobs", "num_drafted", "num_stop_chars")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_STOP_CHARS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    finish_reason: str
    reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    num_drafted: int
    num_stop_chars: int
    def __init__(self, request_id: _Optional[str] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., finish_reason: _Optional[str] = ..., reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., num_drafted: _Optional[int] = ..., num_stop_chars: _Optional[int] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "reason", "code")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INVALID: _ClassVar[Refused.Code]
        BUSY: _ClassVar[Refused.Code]
        UNAVAILABLE: _ClassVar[Refused.Code]
    INVALID: Refused.Code
    BUSY: Refused.Code
    UNAVAILABLE: Refused.Code
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    code: Refused.Code
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., code: _Optional[_Union[Refused.Code, str]] = ...) -> None: ...
