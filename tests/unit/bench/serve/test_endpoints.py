"""Both protocols against a server whose time is moved by hand: what the client says it saw is exact."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bench.certificates import Authority
from headrace.bench.serve.answers import Answer, Question
from headrace.bench.serve.content import Piece
from headrace.bench.serve.grpc_endpoint import GrpcEndpoint
from headrace.bench.serve.http_endpoint import HttpEndpoint
from headrace.bench.serve.records import Moments, RequestRecord
from headrace.bench.serve.slo import Objective
from headrace.bench.serve.workload import Turn
from headrace.config import ClientSettings
from headrace.errors import InvalidRequest, Unavailable
from tests.support.fake_llm import VOCAB_SIZE, Breakdown, FakeLlm, Refusal, serving

PROTOCOLS = ("grpc", "completions", "chat")
CLIENT = ClientSettings()


class HandClock:
    """Counts how often it was looked at, so that a server knows when its client has seen a message."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        return self.now_s

    async def looked_at(self, before: int) -> None:
        async with asyncio.timeout(20):
            while self.looks == before:
                await asyncio.sleep(0.001)


def endpoint_for(protocol, addresses, *, client=CLIENT, timeout_s=20.0):
    address, url = addresses
    if protocol == "grpc":
        return GrpcEndpoint(address, client, 0.0, timeout_s)
    return HttpEndpoint(url, client, "", 0.0, timeout_s, chat=protocol == "chat")


def question_for(protocol, **fields):
    prompt = (
        [("user", "one two"), ("assistant", "three"), ("user", "four")] if protocol == "chat" else [5, 6, 7]
    )
    return Question("r-1", "talk-1", prompt, 8, **fields)


async def asked(protocol, script, clock, *, timeout_s=20.0, **fields):
    """Answer and server."""
    llm = FakeLlm(script, cached_tokens=2)
    async with serving(llm) as addresses:
        endpoint = endpoint_for(protocol, addresses, timeout_s=timeout_s)
        try:
            await endpoint.served()
            answer = Answer(clock, sent_s=clock.now_s)
            await endpoint.ask(question_for(protocol, **fields), answer)
            answer.end_s = clock.now_s
        finally:
            await endpoint.close()
    return answer, llm


def scripted(clock, steps):
    """Messages, each after so many seconds."""

    async def script(_):
        for seconds, token_ids in steps:
            clock.now_s += seconds
            before = clock.looks
            yield token_ids
            await clock.looked_at(before)

    return script


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_times_and_counts(protocol):
    """Due 0.3 s before it was sent; the server stalls for a second before the third message."""
    clock = HandClock()
    steps = [(0.25, [1]), (0.1, [2]), (1.0, [3]), (0.1, [4])]
    answer, _ = await asked(protocol, scripted(clock, steps), clock)
    turn = Turn((Piece(0, 3),), 4)
    moments = Moments(start_s=99.0, due_s=99.7, woken_s=99.7)
    record = RequestRecord.of(answer, turn, moments, ("r-1", 0, 0), 0)
    assert record.status == "ok"
    assert record.ttft_ms == pytest.approx(550.0)
    assert record.ttft_from_sent_ms == pytest.approx(250.0)
    assert record.itls_ms == pytest.approx([100.0, 1000.0, 100.0])
    assert record.tpot_ms == pytest.approx(400.0)
    assert record.tbt10_ms == pytest.approx(1000.0)
    assert record.e2el_ms == pytest.approx(1750.0)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 4, 2)
    assert (record.finish_reason, record.num_messages) == ("length", 4)
    for text, is_good in (
        ("ttft:550.1", True),
        ("ttft:549", False),
        ("tpot:401,ttft:600", True),
        ("tbt10:999", False),
    ):
        assert Objective.parse("--slo", text).is_met(record) is is_good


@pytest.mark.parametrize("protocol", ["grpc", "completions"])
async def test_tokens_of_one_message_have_no_gap_between_them(protocol):
    clock = HandClock()
    script = scripted(clock, [(0.5, [1, 2]), (0.3, [3, 4, 5])])
    answer, _ = await asked(protocol, script, clock, needs_token_ids=True)
    record = RequestRecord.of(answer, Turn((Piece(0, 3),), 5), Moments(100, 100, 100), ("r", 0, 0), 0)
    assert record.itls_ms == pytest.approx([0.0, 300.0, 0.0, 0.0])
    assert record.tpot_ms == pytest.approx(75.0)
    assert answer.token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_what_is_asked(protocol):
    async def script(_):
        yield [1]

    answer, llm = await asked(protocol, script, HandClock())
    [got] = llm.asked
    assert answer.status == "ok"
    assert (got.request_id, got.max_tokens, got.fields["ignore_eos"]) == ("r-1", 8, True)
    if protocol == "chat":
        assert got.prompt == [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ]
    else:
        assert got.prompt == [5, 6, 7]
    if protocol == "grpc":
        assert got.fields["session_id"] == "talk-1"
    else:
        assert got.fields["model"] == "fake"
        assert "return_token_ids" not in got.fields


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("error", "status"), [(Refusal("no room"), "rejected"), (Breakdown("broken"), "failed")]
)
async def test_errors_before_the_first_token(protocol, error, status):
    async def script(_):
        raise error
        yield [1]

    answer, _ = await asked(protocol, script, HandClock())
    assert answer.status == status
    assert str(error) in answer.error
    record = RequestRecord.of(answer, Turn((Piece(0, 3),), 5), Moments(100, 100, 100), ("r", 0, 0), 0)
    assert record.ttft_ms == float("inf")
    assert not Objective({}).is_met(record)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_answer_that_breaks_off_is_none(protocol):
    async def script(_):
        yield [1]
        raise Breakdown("broken")

    answer, _ = await asked(protocol, script, HandClock())
    assert answer.status == "failed"
    assert "broken" in answer.error
    assert len(answer.arrivals) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_answer_without_end_is_given_up(protocol):
    async def script(_):
        yield [1]
        await asyncio.Event().wait()

    answer, _ = await asked(protocol, script, HandClock(), timeout_s=0.5)
    assert answer.status == "timeout"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_what_an_endpoint_says_of_itself(protocol):
    async with serving(FakeLlm(lambda _: None)) as addresses:
        endpoint = endpoint_for(protocol, addresses)
        served = await endpoint.served()
        await endpoint.close()
    assert (served.model, served.vocab_size) == ("fake", VOCAB_SIZE)
    assert endpoint.takes_tokens is (protocol != "chat")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_through_tls_with_a_key(protocol, tmp_path):
    authority = Authority(tmp_path)
    own, key = authority.issue("client"), tmp_path / "key"
    key.write_text("secret\n")
    client = ClientSettings(tls=True, ca_file=own.ca, cert_file=own.cert, key_file=own.key, api_key_file=key)

    async def script(_):
        yield [1]

    llm = FakeLlm(script)
    async with serving(llm, authority.issue("server")) as addresses:
        answer = Answer(HandClock())
        endpoint = endpoint_for(protocol, addresses, client=client)
        try:
            await endpoint.served()
            await endpoint.ask(question_for(protocol), answer)
        finally:
            await endpoint.close()
    assert (answer.status, answer.error) == ("ok", "")
    assert llm.asked[0].fields["authorization"] == "Bearer secret"


async def test_nobody_there():
    endpoint = HttpEndpoint("http://127.0.0.1:9", CLIENT, "", 0.0, 1.0, chat=False)
    with pytest.raises(Unavailable, match="/v1/models"):
        await endpoint.served()
    await endpoint.close()


def test_certificates_that_can_not_be_read(tmp_path):
    client = ClientSettings(tls=True, ca_file=tmp_path / "none")
    with pytest.raises(InvalidRequest, match="ca_file"):
        HttpEndpoint("https://127.0.0.1:9", client, "", 0.0, 1.0, chat=False)


def test_a_key_that_can_not_be_read(tmp_path):
    client = ClientSettings(api_key_file=tmp_path / "none")
    with pytest.raises(InvalidRequest, match="api_key_file"):
        HttpEndpoint("http://127.0.0.1:9", client, "", 0.0, 1.0, chat=False)
