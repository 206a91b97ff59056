from headrace.rpc.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("start", "abort")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    start: StartRequest
    abort: AbortRequest
    def __init__(self, start: _Optional[_Union[StartRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "timeout_s", "cache_salt", "prefill_workers", "sources", "delivered", "priority", "router_id", "traceparent", "label")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: EngineSampling
    timeout_s: float
    cache_salt: str
    prefill_workers: _containers.RepeatedCompositeFieldContainer[PeerRef]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    delivered: _containers.RepeatedCompositeFieldContainer[DeliveredChoice]
    priority: int
    router_id: str
    traceparent: str
    label: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., prefill_workers: _Optional[_Iterable[_Union[PeerRef, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., delivered: _Optional[_Iterable[_Union[DeliveredChoice, _Mapping]]] = ..., priority: _Optional[int] = ..., router_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class DeliveredChoice(_message.Message):
    __slots__ = ("choice", "token_ids", "finished")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker", "num_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: PeerRef
    num_blocks: int
    def __init__(self, worker: _Optional[_Union[PeerRef, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class EngineSampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "min_tokens", "logprobs", "grammar", "n", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    logprobs: int
    grammar: _inference_pb2.Grammar
    n: int
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[_inference_pb2.Grammar, _Mapping]] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_index", "entries")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    entries: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, first_index: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PeerRef(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("deltas", "incarnation")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[SequenceDelta]
    incarnation: str
    def __init__(self, deltas: _Optional[_Iterable[_Union[SequenceDelta, _Mapping]]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class SequenceDelta(_message.Message):
    __slots__ = ("request_id", "token_ids", "end", "logprobs", "choice", "finish_reason", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    end: SequenceEnd
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    choice: int
    finish_reason: str
    prompt_logprobs: PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[SequenceEnd, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ..., finish_reason: _Optional[str] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("error_code", "error_message", "cached_tokens", "prefill_worker", "blocks_moved", "bytes_moved", "transfer_s", "transport", "failed_attempts", "error_field", "queue_s", "prefill_s", "prefill_tokens", "context_tokens", "decode_s", "decode_tokens", "mean_batch", "mean_batch_context_tokens")
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_BATCH_FIELD_NUMBER: _ClassVar[int]
    MEAN_BATCH_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    error_code: str
    error_message: str
    cached_tokens: int
    prefill_worker: str
    blocks_moved: int
    bytes_moved: int
    transfer_s: float
    transport: str
    failed_attempts: int
    error_field: str
    queue_s: float
    prefill_s: float
    prefill_tokens: int
    context_tokens: int
    decode_s: float
    decode_tokens: int
    mean_batch: float
    mean_batch_context_tokens: float
    def __init__(self, error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., blocks_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transport: _Optional[str] = ..., failed_attempts: _Optional[int] = ..., error_field: _Optional[str] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., decode_s: _Optional[float] = ..., decode_tokens: _Optional[int] = ..., mean_batch: _Optional[float] = ..., mean_batch_context_tokens: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "model", "running", "waiting", "blocks", "steps", "prefill_tokens", "output_tokens", "cached_tokens", "draining", "holds", "peers", "metrics_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    incarnation: str
    model: str
    running: int
    waiting: int
    blocks: BlockAccount
    steps: int
    prefill_tokens: int
    output_tokens: int
    cached_tokens: int
    draining: bool
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    metrics_address: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks: _Optional[_Union[BlockAccount, _Mapping]] = ..., steps: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("owner", "reason", "reader", "num_blocks", "remaining_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    owner: str
    reason: str
    reader: str
    num_blocks: int
    remaining_s: float
    def __init__(self, owner: _Optional[str] = ..., reason: _Optional[str] = ..., reader: _Optional[str] = ..., num_blocks: _Optional[int] = ..., remaining_s: _Optional[float] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("worker_id", "incarnation", "connected", "refusal", "bytes_per_s", "transport", "device", "block_latency_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    connected: bool
    refusal: str
    bytes_per_s: float
    transport: str
    device: str
    block_latency_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., connected: _Optional[bool] = ..., refusal: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., transport: _Optional[str] = ..., device: _Optional[str] = ..., block_latency_s: _Optional[float] = ...) -> None: ...

class BlockAccount(_message.Message):
    __slots__ = ("total", "free", "active", "cached", "held", "filling", "quarantined", "problems", "host_total", "host_free", "host_cached", "host_held")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_FREE_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOST_HELD_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    active: int
    cached: int
    held: int
    filling: int
    quarantined: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    host_total: int
    host_free: int
    host_cached: int
    host_held: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., active: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., filling: _Optional[int] = ..., quarantined: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ..., host_total: _Optional[int] = ..., host_free: _Optional[int] = ..., host_cached: _Optional[int] = ..., host_held: _Optional[int] = ...) -> None: ...
