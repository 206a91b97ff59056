"""Values that no request may have, through the public gRPC API: each is refused by name, and no worker hears of it."""

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headrace.rpc.v1 import inference_pb2
from tests.unit.router.test_service import answered, front, ids

NAN, INF = float("nan"), float("inf")
VOCAB_SIZE = 259
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
KIB = 1024

# By field of SamplingParams.
SAMPLING = {
    "temperature": [NAN, INF, -INF, -1, 1e-9, 101, 1e9, 1e308],
    "top_k": [-2, -MAX_INT32],
    "top_p": [NAN, INF, 0, -0.5, 1.5],
    "max_tokens": [0, -1, MAX_INT32, MAX_INT32 + 1, 10**18, MAX_INT64, -MAX_INT64],
    "stop": [[""], ["x"] * 17, ["x"] * 10**5, ["x" * 1025], ["é" * 513], ["x" * 10**6]],
    "stop_token_ids": [[VOCAB_SIZE], [2**32 - 1], [1] * 129],
    "min_p": [NAN, INF, -0.1, 1.1],
    "repetition_penalty": [NAN, INF, 0, -1, 0.001, 101, 1e9],
    "presence_penalty": [NAN, INF, -2.1, 2.1, 1e9],
    "frequency_penalty": [NAN, -INF, -2.1, 2.1, 1e9],
    "logit_bias": [
        *({5: value} for value in (NAN, INF, -INF, 101, -101)),
        *({token_id: 1} for token_id in (-1, VOCAB_SIZE, MAX_INT64)),
        dict.fromkeys(range(1025), 1),
    ],
    "allowed_token_ids": [[VOCAB_SIZE], [1] * 4097],
    "banned_token_ids": [[VOCAB_SIZE], [1] * 4097],
    "min_tokens": [-1, 10**18],
    "logprobs": [-1, 21, 10**6],
    "prompt_logprobs": [-1, 21, 10**6],
    "shown_token_ids": [[VOCAB_SIZE], [1] * 129],
    "n": [0, -1, 65, 10**6, MAX_INT32],
    "grammar": [
        {},
        {"json_object": False},
        *({"json_schema": schema} for schema in ("", "{", "[]", "NaN", "1e999", "false", '{"a": Infinity}')),
        {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000},
        {"json_schema": '{"const": "%s"}' % ("x" * 64 * KIB)},
        *({"regex": regex} for regex in ("", "x" * (16 * KIB + 1))),
        *({"choice": {"texts": texts}} for texts in ([], [""], ["x" * 64 * KIB])),
        *({"lark": lark} for lark in ("", "start: <[5]>", "x" * (16 * KIB + 1))),
    ],
}
USER = {"role": "user", "content": "x"}
EVERY_VALUE_IS_GOOD = {"seed", "ignore_eos"}

REQUESTS = [
    ("input", inference_pb2.GenerateRequest()),
    ("prompt", inference_pb2.GenerateRequest(token_ids={})),
    ("prompt", inference_pb2.GenerateRequest(text="")),  # this model's prompts do not begin with BOS
    ("token_ids", ids(1, VOCAB_SIZE)),
    ("token_ids", ids(2**32 - 1)),
    ("prompt", ids(*[1] * 10**5)),
    ("text", inference_pb2.GenerateRequest(text="x" * 1001)),
    ("text", inference_pb2.GenerateRequest(text="é" * 501)),
    ("chat.messages", inference_pb2.GenerateRequest(chat={})),
    ("chat.messages[0].role", inference_pb2.GenerateRequest(chat={"messages": [{"role": "robot"}]})),
    ("chat", inference_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "x" * 1001}]})),
    *(
        (f"chat.{name}", inference_pb2.GenerateRequest(chat={"messages": [USER], name: text}))
        for name, texts in (
            ("tools_json", ("[", "{}", "[" * 900)),
            ("template_variables_json", ("[]", "{", "NaN")),
        )
        for text in texts
    ),
    *(("priority", inference_pb2.GenerateRequest(text="x", priority=p)) for p in (-5, 5, MAX_INT32)),
    ("service_class", inference_pb2.GenerateRequest(text="x", service_class="none of these")),
    ("request_id", inference_pb2.GenerateRequest(text="x", request_id="x" * 257)),
    ("session_id", inference_pb2.GenerateRequest(text="x", session_id="é" * 129)),
    ("cache_salt", inference_pb2.GenerateRequest(text="x", cache_salt="x" * 10**6)),
]


def violations(error) -> list[tuple[str, str]]:
    """Fields and descriptions by the status's details."""
    found = []
    for detail in rpc_status.from_call(error).details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            found += [(each.field, each.description) for each in bad_request.field_violations]
    return found


async def assert_refused(f, message, field):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        [_ async for _ in f.stub.Generate(message)]
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT, failure.value
    [(named, description)] = violations(failure.value)
    assert named == field or named.startswith(f"{field}[")
    assert failure.value.details().startswith(f"{named}: {description}"[:100])
    assert f.worker.received.empty()


def test_all_numbers_and_lists_have_bad_values_here():
    of_message = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BOOL}
    fields = inference_pb2.SamplingParams.DESCRIPTOR.fields
    names = {field.name for field in fields if field.is_repeated or field.type not in of_message}
    assert names - EVERY_VALUE_IS_GOOD == set(SAMPLING)


@pytest.mark.parametrize("field", SAMPLING)
async def test_pa01_pa02_pa04_sampling_that_is_refused_by_name(tiny_model_files, field):
    async with front(tiny_model_files) as f:
        for value in SAMPLING[field]:
            await assert_refused(f, ids(1, 2, **{field: value}), field)
        _, messages = await answered(f.stub.Generate(ids(1, 2)), f.worker, [5])
        assert [t for message in messages for t in message.token_ids] == [5]


async def test_pa02_pa04_requests_that_are_refused_by_name(tiny_model_files):
    async with front(tiny_model_files) as f:
        for field, message in REQUESTS:
            await assert_refused(f, message, field)
        assert f.door.tally.requests == {}


@pytest.mark.parametrize(
    "sampling",
    [
        *({"temperature": t} for t in (0.0, 1e-4, 100.0)),
        *({"top_k": k} for k in (-1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7)),
        {"top_p": 1.0, "min_p": 1.0, "n": 64},
        {"stop": ["x" * KIB] * 16},
        {"stop_token_ids": [VOCAB_SIZE - 1] * 128, "logit_bias": {VOCAB_SIZE - 1: 100.0}},
        *({"seed": seed} for seed in (0, 2**63, 2**64 - 1)),
        {"logprobs": 20, "prompt_logprobs": 20, "max_tokens": 1, "min_tokens": 1},
    ],
)
async def test_pa01_pa02_pa04_what_lies_on_a_limit_is_taken(tiny_model_files, sampling):
    async with front(tiny_model_files) as f:
        call = f.stub.Generate(ids(1, 2, **sampling))
        asked = (await f.worker.received.get()).start
        for name in sampling.keys() - {"stop", "top_k"}:
            assert getattr(asked.sampling, name) == sampling[name]
        if "top_k" in sampling:
            assert asked.sampling.top_k == (1 if sampling["top_k"] == 1 else 0)
        call.cancel()


async def test_pa04_a_deadline_of_thirty_years_is_one(tiny_model_files):
    async with front(tiny_model_files) as f:
        _, messages = await answered(f.stub.Generate(ids(1, 2), timeout=1e9), f.worker, [5])
        assert messages[-1].finish_reason


@pytest.mark.parametrize("token_ids", [[VOCAB_SIZE], [2**32 - 1], [1] * 5000])
async def test_pa02_pa04_token_ids_without_a_text(tiny_model_files, token_ids):
    async with front(tiny_model_files) as f:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await f.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=token_ids))
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        [(field, _)] = violations(failure.value)
        assert field == "token_ids"
