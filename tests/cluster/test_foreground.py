"""The real processes without Ray, as a supervisor would run them: router, prefill and decode workers, over NIXL."""

from __future__ import annotations

import signal
import time
import uuid

import grpc
import pytest

from headrace.cluster.redis_server import RedisServer
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from headrace.sampling_params import SamplingParams
from kv_transfer.layout import KvLayout
from tests.support.processes import (
    Process,
    ask,
    assert_idle,
    eventually,
    request,
    tokens,
    worker_status,
)
from tests.support.tiny_llama import write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(300)]
OTHER = [5 + (11 * i) % 200 for i in range(300)]
NUM_TOKENS = 40


class Fleet:
    """Processes that share one directory."""

    def __init__(self, folder, directory_url: str, model: str) -> None:
        self.folder = folder
        self.model = model
        self._url = directory_url
        self._cluster = f"test-{uuid.uuid4().hex[:8]}"
        self.processes: list[Process] = []

    def start(self, kind: str, *settings: str, model: str = "") -> Process:
        name = f"{kind}-{len(self.processes)}"
        fixed = [
            f"model.ref={model or self.model}",
            "model.dtype=float32",
            f"directory.url={self._url}",
            f"directory.cluster={self._cluster}",
            "engine.block_size_tokens=16",
            "engine.num_blocks=256",
            "engine.max_step_tokens=64",
            "engine.num_threads=1",
            "kv.lease_ttl_s=3",
            "directory.worker_ttl_s=2",
        ]
        options = [option for pair in (*fixed, *settings) for option in ("--set", pair)]
        if kind != "router":
            options += ["--id", name]
        process = Process([kind, *options], self.folder, name)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.popen.terminate()
        for process in self.processes:
            process.stop()


@pytest.fixture(scope="module")
def redis_url():
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def fleet(tmp_path, redis_url, tiny_model):
    fleet = Fleet(tmp_path, redis_url, tiny_model)
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def trio(fleet):
    """Router, one prefill and one decode worker, all serving."""
    router, prefill, decode = (fleet.start(kind) for kind in ("router", "prefill", "decode"))
    for process in (prefill, decode, router):
        process.wait_until_serving()
    # The router is ready as soon as it sees a decode worker; here the prefill worker is wanted too.
    eventually(
        lambda: ask(router.address, OTHER[:100], max_tokens=1)[-1].hand_off.prefill_worker, "prefill is seen"
    )
    return router, prefill, decode


def test_an_answer_crosses_the_whole_system(trio):
    router, prefill, decode = trio
    cold = ask(router.address, PROMPT, max_tokens=NUM_TOKENS)
    end = cold[-1]
    assert len(tokens(cold)) == NUM_TOKENS
    assert end.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert end.usage.prompt_tokens == len(PROMPT)
    assert end.usage.completion_tokens == NUM_TOKENS
    assert end.usage.cached_tokens == 0
    assert end.hand_off.prefill_worker == prefill.name
    assert end.hand_off.decode_worker == decode.name
    assert end.hand_off.transport == "nixl"
    assert end.hand_off.blocks_moved == -(-len(PROMPT) // 16)
    # 2 layers of keys and values, 2 heads of 16 floats, 16 tokens a block
    assert end.hand_off.bytes_moved == end.hand_off.blocks_moved * 2 * 2 * 2 * 16 * 16 * 4
    assert worker_status(prefill.address).prefill_tokens >= len(PROMPT)
    assert worker_status(decode.address).output_tokens >= NUM_TOKENS - 1

    warm = ask(router.address, PROMPT, max_tokens=NUM_TOKENS)
    assert tokens(warm) == tokens(cold)
    assert warm[-1].usage.cached_tokens >= len(PROMPT) - 16
    assert_idle(prefill.address, decode.address)


def test_a_killed_prefill_worker_is_replaced_by_local_prefill(trio):
    router, prefill, decode = trio
    before = ask(router.address, PROMPT, max_tokens=NUM_TOKENS)
    prefill.send(signal.SIGKILL)
    during = ask(
        router.address, [*OTHER, 9], max_tokens=NUM_TOKENS
    )  # nothing of it is cached at the decode worker
    assert len(tokens(during)) == NUM_TOKENS
    assert during[-1].hand_off.prefill_worker == ""
    assert tokens(ask(router.address, PROMPT, max_tokens=NUM_TOKENS)) == tokens(before)
    assert_idle(decode.address)


def test_a_prefill_worker_killed_in_the_middle_of_a_prompt(fleet):
    router, decode = fleet.start("router"), fleet.start("decode")
    prefill = fleet.start("prefill", "engine.max_step_tokens=16")  # many small chunks
    for process in (prefill, decode, router):
        process.wait_until_serving()
    long_prompt = [3 + (13 * i) % 200 for i in range(1500)]
    eventually(
        lambda: ask(router.address, OTHER[:100], max_tokens=1)[-1].hand_off.prefill_worker, "prefill is seen"
    )
    computed = worker_status(prefill.address).prefill_tokens
    with grpc.insecure_channel(router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            request(long_prompt, max_tokens=8), timeout=60
        )
        eventually(lambda: worker_status(prefill.address).prefill_tokens > computed, "it computes")
        prefill.send(signal.SIGKILL)
        answer = list(call)
    alone = ask(router.address, long_prompt, max_tokens=8)
    assert tokens(answer) == tokens(alone)
    assert len(tokens(answer)) == 8
    assert_idle(decode.address)


def test_a_stopped_prefill_worker_costs_a_pause_and_no_answer(fleet):
    router, decode = (
        fleet.start("router"),
        fleet.start("decode", "kv.progress_timeout_s=2", "kv.connect_timeout_s=2"),
    )
    prefill = fleet.start("prefill")
    for process in (prefill, decode, router):
        process.wait_until_serving()
    eventually(
        lambda: ask(router.address, OTHER[:100], max_tokens=1)[-1].hand_off.prefill_worker, "prefill is seen"
    )
    prefill.send(signal.SIGSTOP)
    try:
        answer = ask(router.address, PROMPT, max_tokens=NUM_TOKENS)
        assert len(tokens(answer)) == NUM_TOKENS
        assert answer[-1].hand_off.prefill_worker == ""
        assert_idle(decode.address)
    finally:
        prefill.send(signal.SIGCONT)
    eventually(
        lambda: (
            ask(router.address, [int(time.time()) % 200, *OTHER], max_tokens=1)[-1].hand_off.prefill_worker
        ),
        "it is used again",
    )
    assert_idle(decode.address, prefill.address)


def test_a_killed_decode_worker_without_another_gives_a_definite_error(trio):
    router, prefill, decode = trio
    with grpc.insecure_channel(router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            request(PROMPT, max_tokens=3000), timeout=60
        )
        next(call)
        decode.send(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as failure:
            list(call)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "no decode worker" in failure.value.details()
    with pytest.raises(grpc.RpcError) as failure:
        ask(router.address, PROMPT, max_tokens=1)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert_idle(prefill.address)


def test_a_client_that_cancels_frees_everything(trio):
    router, prefill, decode = trio
    with grpc.insecure_channel(router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for prompt in (PROMPT, OTHER, PROMPT + OTHER):
            call = stub.Generate(request(prompt, max_tokens=3000), timeout=60)
            next(call)
            call.cancel()
        for prompt in ([1, *PROMPT], [1, *OTHER]):  # before the first token
            stub.Generate(request(prompt, max_tokens=3000), timeout=60).cancel()
    assert_idle(prefill.address, decode.address)
    produced = worker_status(decode.address).output_tokens
    assert produced < 3 * 3000
    assert len(tokens(ask(router.address, PROMPT, max_tokens=NUM_TOKENS))) == NUM_TOKENS


def test_a_worker_with_another_model_is_refused_at_the_handshake(trio, fleet, tmp_path):
    _, _, decode = trio
    stranger = fleet.start("prefill", model=str(write_tiny_llama(tmp_path / "stranger", seed=1)))
    stranger.wait_until_serving()
    status = worker_status(stranger.address)
    ref = worker_pb2.PeerRef(
        worker_id=stranger.name, address=stranger.address, incarnation=status.incarnation
    )

    with grpc.insecure_channel(stranger.address) as channel:
        layout = KvLayout(
            model_fingerprint="another",
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            dtype="float32",
            row_bytes=64,
            block_size_tokens=32,
            transport="nixl",
        )
        handshake = kv_pb2.HandshakeRequest(
            self=worker_pb2.PeerRef(worker_id="x", incarnation="y"),
            expected_incarnation=status.incarnation,
            layout=layout.to_proto(),
        )
        with pytest.raises(grpc.RpcError) as refusal:
            kv_pb2_grpc.KvExchangeStub(channel).Handshake(handshake, timeout=10)
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "model_fingerprint" in refusal.value.details()

    with grpc.insecure_channel(decode.address) as channel:
        start = worker_pb2.StartRequest(
            request_id="r",
            token_ids=PROMPT,
            sampling=sampling_to_proto(SamplingParams(max_tokens=3, temperature=0)),
            timeout_s=30,
            prefill_workers=[ref],
        )
        end = _answer_of(worker_pb2_grpc.WorkerStub(channel), start)
    assert not end.error_code
    assert end.failed_attempts == 1
    assert end.prefill_worker == ""
    assert "KV layout mismatch in model_fingerprint" in decode.log.read_text()
    assert_idle(decode.address, stranger.address)


def _answer_of(stub: worker_pb2_grpc.WorkerStub, start: worker_pb2.StartRequest) -> worker_pb2.SequenceEnd:
    """Run one request over a session of our own."""
    done = False

    def messages():
        yield worker_pb2.SessionRequest(start=start)
        while not done:
            time.sleep(0.05)

    for frame in stub.Session(messages(), timeout=60):
        for delta in frame.deltas:
            if delta.HasField("end"):
                done = True
                return delta.end
    raise AssertionError("no end")


def test_workers_drain_on_sigterm(trio):
    router, prefill, decode = trio
    with grpc.insecure_channel(router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT, max_tokens=200), timeout=60)
        next(call)
        decode.popen.terminate()  # the answer under way is finished first
        assert 1 + len(tokens(call)) >= 200
    assert decode.popen.wait(30) == 0
    prefill.popen.terminate()
    router.popen.terminate()
    assert prefill.popen.wait(30) == 0
    assert router.popen.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--set", "engine.block_size=4"], "engine.block_size"),
        (["decode", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["router", "--set", "directory.url=redis://127.0.0.1:1/0", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_can_not_start_says_why_and_ends(arguments, message, tmp_path):
    process = Process(arguments, tmp_path, "failing")
    try:
        assert process.popen.wait(60) in (1, 2)
        assert message in process.log.read_text()
        assert "Traceback" not in process.log.read_text()
    finally:
        process.stop()
