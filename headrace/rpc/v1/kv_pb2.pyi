from headrace.rpc.v1 import inference_pb2 as _inference_pb2
from headrace.rpc.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(_message.Message):
    __slots__ = ("schema_version", "model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "dtype", "block_size_tokens", "tp_size", "transport", "row_bytes", "tp_rank")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size_tokens: int
    tp_size: int
    transport: str
    row_bytes: int
    tp_rank: int
    def __init__(self, schema_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., tp_size: _Optional[int] = ..., transport: _Optional[str] = ..., row_bytes: _Optional[int] = ..., tp_rank: _Optional[int] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("boot_id", "pid_namespace", "shared_memory", "rdma_devices", "tcp_device")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    TCP_DEVICE_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid_namespace: str
    shared_memory: bool
    rdma_devices: _containers.RepeatedCompositeFieldContainer[RdmaDevice]
    tcp_device: str
    def __init__(self, boot_id: _Optional[str] = ..., pid_namespace: _Optional[str] = ..., shared_memory: _Optional[bool] = ..., rdma_devices: _Optional[_Iterable[_Union[RdmaDevice, _Mapping]]] = ..., tcp_device: _Optional[str] = ...) -> None: ...

class RdmaDevice(_message.Message):
    __slots__ = ("name", "link_layer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    name: str
    link_layer: str
    def __init__(self, name: _Optional[str] = ..., link_layer: _Optional[str] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("self", "expected_incarnation", "layout", "transport_metadata", "host")
    SELF_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_METADATA_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    self: _worker_pb2.PeerRef
    expected_incarnation: str
    layout: Layout
    transport_metadata: _containers.RepeatedScalarFieldContainer[bytes]
    host: Host
    def __init__(self_, self: _Optional[_Union[_worker_pb2.PeerRef, _Mapping]] = ..., expected_incarnation: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., transport_metadata: _Optional[_Iterable[bytes]] = ..., host: _Optional[_Union[Host, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("self", "layout", "transport_metadata", "host")
    SELF_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_METADATA_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    self: _worker_pb2.PeerRef
    layout: Layout
    transport_metadata: _containers.RepeatedScalarFieldContainer[bytes]
    host: Host
    def __init__(self_, self: _Optional[_Union[_worker_pb2.PeerRef, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., transport_metadata: _Optional[_Iterable[bytes]] = ..., host: _Optional[_Union[Host, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("lease_id", "reader", "expected_incarnation", "token_ids", "num_output_tokens", "sampling", "cache_salt", "timeout_s", "lease_ttl_s", "checksum", "sources", "priority", "router_id", "traceparent", "label", "request_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reader: _worker_pb2.PeerRef
    expected_incarnation: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: int
    sampling: _worker_pb2.EngineSampling
    cache_salt: str
    timeout_s: float
    lease_ttl_s: float
    checksum: bool
    sources: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Source]
    priority: int
    router_id: str
    traceparent: str
    label: str
    request_id: str
    def __init__(self, lease_id: _Optional[str] = ..., reader: _Optional[_Union[_worker_pb2.PeerRef, _Mapping]] = ..., expected_incarnation: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_worker_pb2.EngineSampling, _Mapping]] = ..., cache_salt: _Optional[str] = ..., timeout_s: _Optional[float] = ..., lease_ttl_s: _Optional[float] = ..., checksum: _Optional[bool] = ..., sources: _Optional[_Iterable[_Union[_worker_pb2.Source, _Mapping]]] = ..., priority: _Optional[int] = ..., router_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., label: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "blocks_ready", "first_token", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    blocks_ready: BlocksReady
    first_token: FirstToken
    prompt_logprobs: _worker_pb2.PromptLogprobs
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., blocks_ready: _Optional[_Union[BlocksReady, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_worker_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class BlocksReady(_message.Message):
    __slots__ = ("first_index", "block_ids", "checksums", "generations")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_index: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "choice")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _inference_pb2.TokenLogprobs
    choice: int
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("lease_id", "reader", "expected_incarnation", "names", "lease_ttl_s", "checksum")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reader: _worker_pb2.PeerRef
    expected_incarnation: str
    names: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ttl_s: float
    checksum: bool
    def __init__(self, lease_id: _Optional[str] = ..., reader: _Optional[_Union[_worker_pb2.PeerRef, _Mapping]] = ..., expected_incarnation: _Optional[str] = ..., names: _Optional[_Iterable[bytes]] = ..., lease_ttl_s: _Optional[float] = ..., checksum: _Optional[bool] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("block_ids", "generations", "checksums")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "incarnation", "reader")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    incarnation: str
    reader: str
    def __init__(self, lease_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., reader: _Optional[str] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "incarnation", "reader", "block_ids", "generations")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    incarnation: str
    reader: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., reader: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("owner", "expected_incarnation", "blocks", "timeout_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    owner: _worker_pb2.PeerRef
    expected_incarnation: str
    blocks: _containers.RepeatedCompositeFieldContainer[NamedBlock]
    timeout_s: float
    def __init__(self, owner: _Optional[_Union[_worker_pb2.PeerRef, _Mapping]] = ..., expected_incarnation: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[NamedBlock, _Mapping]]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class NamedBlock(_message.Message):
    __slots__ = ("digest", "parent_digest")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parent_digest: bytes
    def __init__(self, digest: _Optional[bytes] = ..., parent_digest: _Optional[bytes] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("num_present",)
    NUM_PRESENT_FIELD_NUMBER: _ClassVar[int]
    num_present: int
    def __init__(self, num_present: _Optional[int] = ...) -> None: ...
