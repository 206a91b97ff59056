"""A model runner without a model: the next token is a hash of what the KV blocks hold. Used in tests and simulation.

The KV of a token is one number that depends on the token and on the KV before it, as in a real model:

    kv[i] = mix(kv[i - 1], token[i])          next token = kv[last] mod vocabulary

It is written into and read back from a store by block id, through the sequence's block table. So a block that was
handed out twice, recycled too early or found under a wrong name gives wrong numbers, and the step raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.engine.sequence import Chunk, ChunkResult, Drawn, StepPlan
from headrace.errors import HeadraceError

_MASK = (1 << 64) - 1
_NOTHING_BEFORE = 0x9E3779B97F4A7C15


class ScriptedRunner:
    """Draws are greedy: a function of the tokens alone, the same as `next_token`.

    `forced` replaces the draws of a sequence, by its id: the n-th entry is its n-th output token, or the error it fails
    with there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        vocab_size: int = 256,
        forced: Mapping[str, Sequence[int | HeadraceError]] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._block_size_tokens = block_size_tokens
        self._kv: list[list[int | None]] = [[None] * block_size_tokens for _ in range(num_blocks)]
        self._forced = forced or {}

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """As the ModelRunner seam says. Raises AssertionError when a block does not hold what it should."""
        for chunk in plan.chunks:
            self._write(chunk)
        return [self._result(chunk, self._read(chunk)) for chunk in plan.chunks]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._kv[target] = list(self._kv[source])

    def copy_block(self, source: ScriptedRunner, source_block_id: int, block_id: int) -> None:
        """What a READ from another worker's cache does."""
        self._kv[block_id] = list(source._kv[source_block_id])

    def _result(self, chunk: Chunk, last: int) -> ChunkResult:
        """The same token for all choices."""
        if not chunk.samples:
            return ChunkResult()
        forced = self._forced.get(chunk.sequence.id, ())
        position = chunk.sequence.num_output_tokens
        result = forced[position] if position < len(forced) else _token(last, self.vocab_size)
        if isinstance(result, HeadraceError):
            return ChunkResult(error=result)
        return ChunkResult([Drawn(result)] * len(chunk.sequence.choices))

    def _write(self, chunk: Chunk) -> None:
        """The chunk's KV, from the KV that the blocks really hold before it."""
        before = self._slot(chunk, chunk.start - 1) if chunk.start else _NOTHING_BEFORE
        assert before is not None, f"{chunk.sequence.id}: no KV before position {chunk.start}"
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            before = _mix(before, chunk.sequence.token_ids[position])
            block_id = chunk.sequence.block_ids[position // self._block_size_tokens]
            self._kv[block_id][position % self._block_size_tokens] = before

    def _read(self, chunk: Chunk) -> int:
        """The KV of the chunk's last token, after a look at everything before it."""
        expected = _NOTHING_BEFORE
        for position in range(chunk.start + chunk.num_tokens):
            expected = _mix(expected, chunk.sequence.token_ids[position])
            if self._slot(chunk, position) != expected:
                raise AssertionError(f"{chunk.sequence.id}: wrong KV at position {position}")
        return expected

    def _slot(self, chunk: Chunk, position: int) -> int | None:
        block_id = chunk.sequence.block_ids[position // self._block_size_tokens]
        return self._kv[block_id][position % self._block_size_tokens]


def next_token(token_ids: Sequence[int], vocab_size: int = 256) -> int:
    """What a ScriptedRunner draws after these tokens: the oracle for tests."""
    kv = _NOTHING_BEFORE
    for token_id in token_ids:
        kv = _mix(kv, token_id)
    return _token(kv, vocab_size)


def continuation(token_ids: Sequence[int], num_tokens: int, vocab_size: int = 256) -> list[int]:
    """The next `num_tokens` tokens, one after the other."""
    known = list(token_ids)
    for _ in range(num_tokens):
        known.append(next_token(known, vocab_size))
    return known[len(token_ids) :]


def _mix(kv: int, token_id: int) -> int:
    """One step of a 64-bit linear congruential generator, with the token folded in."""
    return ((kv ^ (token_id + 1)) * 6364136223846793005 + 1442695040888963407) & _MASK


def _token(kv: int, vocab_size: int) -> int:
    return (kv >> 33) % vocab_size  # the low bits of such a generator are poor
