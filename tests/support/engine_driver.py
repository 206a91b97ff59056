"""An engine over a scripted runner, stepped by hand, with everything it reported kept for a look."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AnySequence

from headrace.clock import VirtualClock
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.scripted_runner import ScriptedRunner
from headrace.engine.sequence import (
    ChunkResult,
    Event,
    Failed,
    NewToken,
    Sequence,
    Started,
    StepOutput,
    StepPlan,
)
from headrace.engine.tiers import BlockFiles
from headrace.errors import HeadraceError
from headrace.sampling_params import SamplingParams
from headrace.tier import Tier
from tests.support.tiered import ScriptedMemory

ROOT = b"root of the tests"[:16]
EOS = 1
VOCAB_SIZE = 256


def make_sequence(
    sequence_id: str,
    token_ids: AnySequence[int],
    max_tokens: int = 4,
    *,
    hold_ttl_s: float | None = None,
    num_output_tokens: int = 0,
    root: bytes = ROOT,
) -> Sequence:
    """A greedy sequence without end-of-text, so that it ends by length alone unless a test says otherwise."""
    return Sequence(
        id=sequence_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) - num_output_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        root=root,
        hold_ttl_s=hold_ttl_s,
    )


class RecordingRunner(ScriptedRunner):
    """Keeps (sequence id, start, number of tokens) of every chunk, by step."""

    def __init__(
        self, num_blocks: int, block_size_tokens: int, forced: Mapping[str, AnySequence[int | HeadraceError]]
    ):
        super().__init__(num_blocks, block_size_tokens, VOCAB_SIZE, forced)
        self.steps: list[list[tuple[str, int, int]]] = []

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        self.steps.append([(chunk.sequence.id, chunk.start, chunk.num_tokens) for chunk in plan.chunks])
        return super().run(plan)


class EngineDriver:
    def __init__(
        self,
        num_blocks: int = 32,
        block_size_tokens: int = 4,
        *,
        max_step_tokens: int = 8,
        max_sequences: int = 8,
        max_waiting: int = 64,
        forced: Mapping[str, AnySequence[int | HeadraceError]] | None = None,
        num_host_blocks: int = 0,
        files: BlockFiles | None = None,
    ) -> None:
        settings = EngineSettings(
            block_size_tokens=block_size_tokens,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
        )
        self.clock = VirtualClock()
        self.runner = RecordingRunner(num_blocks, block_size_tokens, forced or {})
        memory = ScriptedMemory(self.runner, num_host_blocks)
        self.pool = BlockPool(num_blocks, block_size_tokens, memory, files)
        self.engine = Engine(self.runner, self.pool, settings, frozenset({EOS}), self.clock)
        self.events: list[Event] = []
        self.tiers: dict[bytes, Tier] = {}  # what a listener believes to be cached, and where

    def submit(self, sequence_id: str, token_ids: AnySequence[int], max_tokens: int = 4) -> Sequence:
        sequence = make_sequence(sequence_id, token_ids, max_tokens)
        self.engine.submit(sequence)
        return sequence

    def hold(self, sequence_id: str, token_ids: AnySequence[int], ttl_s: float = 10.0) -> Sequence:
        """Submit a sequence that ends after one token and keeps its blocks."""
        sequence = make_sequence(sequence_id, token_ids, hold_ttl_s=ttl_s)
        self.engine.submit(sequence)
        return sequence

    def reserve(self, sequence_id: str, token_ids: AnySequence[int], max_tokens: int = 4) -> Sequence:
        sequence = make_sequence(sequence_id, token_ids, max_tokens)
        self.engine.reserve(sequence)
        return sequence

    def step(self) -> StepOutput:
        """One step; returns its output, what came early included."""
        outputs: list[StepOutput] = []
        outputs.append(self.engine.step(early=outputs.append))
        merged = StepOutput()
        for output in outputs:
            merged.events += output.events
            merged.stored |= output.stored
            merged.removed += output.removed
            for digest, tier in output.stored.items():
                assert self.tiers.get(digest) is not tier
                self.tiers[digest] = tier
            for digest in output.removed:
                del self.tiers[digest]
        self.events += merged.events
        return merged

    @property
    def stored(self) -> set[bytes]:
        return set(self.tiers)

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing more can be done."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def events_of(self, sequence_id: str) -> list[Event]:
        return [event for event in self.events if event.sequence_id == sequence_id]

    def tokens(self, sequence_id: str) -> list[int]:
        return [event.token_id for event in self.events_of(sequence_id) if isinstance(event, NewToken)]

    def cached_tokens(self, sequence_id: str) -> int:
        [started] = [event for event in self.events_of(sequence_id) if isinstance(event, Started)]
        return started.num_cached_tokens

    def error(self, sequence_id: str) -> HeadraceError:
        [failed] = [event for event in self.events_of(sequence_id) if isinstance(event, Failed)]
        return failed.error

    def computed_positions(self, sequence_id: str) -> list[int]:
        """Positions put through the model for this sequence, in order."""
        return [
            position
            for step in self.runner.steps
            for chunk_id, start, num_tokens in step
            if chunk_id == sequence_id
            for position in range(start, start + num_tokens)
        ]
