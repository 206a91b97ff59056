"""Several ranks are the model that one is: logits and greedy tokens, of every family, however the text is cut."""

from __future__ import annotations

from functools import cache

import gguf
import pytest
import torch

from headrace.config import EngineSettings
from headrace.engine.engine import Engine
from headrace.engine.forward import EagerForward, ForwardPass
from headrace.engine.kv_cache import KvCache
from headrace.engine.models.decoder import Decoder
from headrace.engine.parallel.ranks import ParallelForward
from headrace.engine.sequence import Chunk, Failed, NewToken, PromptLogprobs, Sequence, StepPlan
from headrace.engine.shard import Shard
from headrace.engine.weights.load import load_model
from headrace.sampling_params import SamplingParams
from headrace.tier import Tier
from tests.support.audit import assert_idle_pool
from tests.support.engines import engine_for
from tests.support.ranks import rank_threads
from tests.support.small_models import MODELS, VOCAB_SIZE, random_model, write_folder, write_gguf
from tests.support.tiered import DictFiles

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 8, 40, 110
PROMPT = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = {"at once": (NUM_TOKENS,), "unlike": (1, 2, 40, 1, 1, 33, 5)}


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    """A model's files, each once."""

    @cache
    def write(name: str):
        return write_folder(random_model(name), tmp_path_factory.mktemp("small"))

    return write


@torch.inference_mode()
def logits_of(forward: ForwardPass, cut: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] at each position of the prompt, whose chunks follow one another through a paged cache."""
    sequence = Sequence("s", PROMPT, NUM_TOKENS, SamplingParams(max_tokens=1), root=b"")
    order = torch.Generator().manual_seed(2)
    sequence.block_ids = torch.randperm(NUM_BLOCKS, generator=order).tolist()
    parts, start = [], 0
    while start < NUM_TOKENS:
        size = min(cut[min(len(parts), len(cut) - 1)], NUM_TOKENS - start)
        assert forward.run(StepPlan([Chunk(sequence, start, size)])) == [size - 1]
        parts.append(forward.logits(range(size)).clone())
        start += size
    return torch.cat(parts)


def of_one(files, backend: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(files, dtype)
    settings = EngineSettings(num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE)
    return logits_of(
        EagerForward(model, KvCache.for_model(model.config, settings, dtype), backend),
        CUTS["at once"],
    )


def assert_same_logits(files, size: int, backend: str = "torch") -> None:
    expected = of_one(files, backend)
    with rank_threads(
        files, size, num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE, backend=backend
    ) as ranks:
        for shard in ranks.shards:
            shard.cache.tensor.fill_(torch.nan)
        forward = ranks.runner._own._forward
        assert isinstance(forward, ParallelForward)
        for cut in CUTS.values():
            torch.testing.assert_close(logits_of(forward, cut), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_two_ranks_are_those_of_one(files_of, name):
    assert_same_logits(files_of(name), 2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_backends_and_copies_of_heads(files_of, size, backend):
    """With four ranks each KV head is at two of them."""
    assert_same_logits(files_of("gemma3, scaled queries, caps"), size, backend)


def test_bfloat16(files_of):
    """Partial sums are rounded before they are added, so it is not the same: but near."""
    files = files_of("llama")
    expected = of_one(files, "torch", torch.bfloat16)
    with rank_threads(
        files, 2, dtype="bfloat16", num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE
    ) as ranks:
        found = logits_of(ranks.runner._own._forward, CUTS["at once"])
    assert (found - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama, wide heads, tied", "qwen3", "gemma3"])
def test_logits_from_gguf_files(tmp_path, name, kind):
    files = write_gguf(random_model(name), tmp_path / "small.gguf", gguf.GGMLQuantizationType[kind])
    assert_same_logits(files, 2)


@pytest.mark.parametrize("name", ["llama", "qwen3, biases, untied", "gemma3"])
def test_ranks_hold_the_model_once(files_of, name):
    """Each weight that is split is at one rank; norms, and copies of heads, are at all."""
    files = files_of(name)
    whole = load_model(files, torch.float32)
    shards = [load_model(files, torch.float32, shard=Shard(rank, 2)) for rank in range(2)]
    assert [num_weights(shard) for shard in shards] == [num_weights(whole) // 2] * 2
    embedding = torch.cat([shard.embedding.weight for shard in shards])
    assert torch.equal(embedding, whole.embedding.weight)
    for number, layer in enumerate(whole.layers):
        down = torch.cat([shard.layers[number].down.weight for shard in shards], dim=1)
        assert torch.equal(down, layer.down.weight)


def num_weights(model: Decoder) -> int:
    """Of all matrices."""
    linear = [part for layer in model.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    tables = {id(each): each for each in (model.embedding.weight, model.head.weight)}
    return sum(each.numel() for each in (*tables.values(), *(part.weight for part in linear)))


# --- engines


def engine_of_one(files, **engine) -> Engine:
    return engine_for(files, block_size_tokens=4, backend="torch", **{"num_blocks": 64, **engine})


def answers(engine: Engine, requests: dict[str, Sequence]) -> dict[str, list]:
    """All events of each, in order, and nothing left behind."""
    for sequence in requests.values():
        engine.submit(sequence)
    found: dict[str, list] = {name: [] for name in requests}
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, NewToken | PromptLogprobs | Failed):
                found[event.sequence_id].append(event)
    assert_idle_pool(engine.audit())
    return found


def tokens(events: list) -> dict[int, list[int]]:
    """By choice."""
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, NewToken):
            found.setdefault(event.choice, []).append(event.token_id)
    return found


def sequence(name: str, prompt: list[int], **sampling) -> Sequence:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **sampling})
    return Sequence(name, list(prompt), len(prompt), params, root=b"root")


def burst(**sampling) -> dict[str, Sequence]:
    """Prompts of many lengths, some with a common beginning."""
    prompts = {"a": PROMPT[:50], "b": [*PROMPT[:50], 5, 6, 7], "c": PROMPT[20:23], "d": PROMPT[40:101]}
    return {name: sequence(name, prompt, **sampling) for name, prompt in prompts.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_are_those_of_one(files_of, name):
    """In chunks, then with the prefix cached, then with so few blocks that some are preempted."""
    files = files_of(name)
    for engine in ({"max_step_tokens": 7}, {"num_blocks": 40, "max_step_tokens": 64}):
        one = engine_of_one(files, **engine)
        expected = {name: tokens(events) for name, events in answers(one, burst()).items()}
        with rank_threads(files, 2, **engine) as ranks:
            several = ranks.engine()
            for _ in range(2):
                found = answers(several, burst())
                assert {name: tokens(events) for name, events in found.items()} == expected
            load = several.load()
            assert (load.preemptions if "num_blocks" in engine else load.cached_tokens) > 0


def test_choices_and_logprobs(files_of):
    """Blocks that are copied when choices split; logits of prompt rows that come in messages of their own."""
    wanted = {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 2, "prompt_logprobs": 1}
    expected = answers(engine_of_one(files_of("qwen3")), burst(**wanted))
    with rank_threads(files_of("qwen3"), 2) as ranks:
        found = answers(ranks.engine(), burst(**wanted))
    for name, events in expected.items():
        assert tokens(found[name]) == tokens(events)
        assert set(tokens(events)) == {0, 1, 2}
        assert logprobs(found[name]) == pytest.approx(logprobs(events), abs=1e-4)


def logprobs(events: list) -> list[float]:
    found = [entry for event in events if isinstance(event, PromptLogprobs) for entry in event.entries]
    found += [event.logprobs for event in events if isinstance(event, NewToken)]
    return [entry.logprob for entry in found]


def test_lower_tiers(files_of):
    """Blocks that went to the host's memory, and from there to files, come back to each rank."""
    files = files_of("llama")
    one = engine_of_one(files)
    prompts = [[(11 * number + 3 * i) % VOCAB_SIZE for i in range(60)] for number in range(4)]
    expected = [tokens(answers(one, {"s": sequence("s", prompt)})["s"]) for prompt in prompts]
    num_host_blocks = 20
    block_bytes = engine_of_one(files)._runner._cache.block_bytes
    with rank_threads(files, 2, num_blocks=24, host_memory_bytes=num_host_blocks * block_bytes) as ranks:
        assert [memory.num_host_blocks for memory in ranks.memories] == [num_host_blocks] * 2
        engine = ranks.engine(disk := DictFiles(1000))
        pairs = list(zip(prompts, expected, strict=True))
        for prompt, tokens_of_one in (*pairs, *reversed(pairs)):
            assert tokens(answers(engine, {"s": sequence("s", prompt)})["s"]) == tokens_of_one
        hits = {stats.tier: stats.hits for stats in engine.load().tiers}
        assert hits[Tier.HOST] > 0
        assert disk.num_taken > 0


def test_a_step_is_one_message_of_few_bytes(files_of):
    with rank_threads(files_of("llama"), 2) as ranks:
        engine = ranks.engine()
        engine.submit(sequence("s", PROMPT[:40], max_tokens=11))
        engine.step()
        before = ranks.ranks.num_messages, ranks.ranks.sent_bytes
        for _ in range(10):
            engine.step()
        assert ranks.ranks.num_messages - before[0] == 10
        # Length, kind, four numbers; one span of three; one token; 11 to 13 blocks; one row: 4 bytes each.
        assert ranks.ranks.sent_bytes - before[1] <= 10 * 4 * (6 + 3 + 1 + 13 + 1)


def test_a_token_that_the_model_does_not_have_fails_its_own_sequence(files_of):
    with rank_threads(files_of("llama"), 2) as ranks:
        requests = {"bad": sequence("bad", [1, VOCAB_SIZE]), "good": sequence("good", [1, 2])}
        found = answers(ranks.engine(), requests)
        assert [type(event) for event in found["bad"]] == [Failed]
        assert len(found["good"]) == 20
        assert ranks.lost == []
