"""The model runner: a step plan becomes one forward pass over all its tokens, then a draw for each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import structlog
import torch

from headrace.engine.forward import ForwardPass
from headrace.engine.kv_cache import KvCache
from headrace.engine.logit_edits import LogitEdits
from headrace.engine.logprobs import logprobs
from headrace.engine.sampler import Draw, sample
from headrace.engine.sequence import Chunk, ChunkResult, Drawn, Sequence, StepPlan
from headrace.errors import HeadraceError, InternalError, RankLost
from headrace.sampling_params import SamplingParams, TokenLogprobs

log = structlog.get_logger()

_PROMPT_ROWS = 64  # of logits in memory at a time, for the logprobs of a prompt

_Outcome = Drawn | HeadraceError


class TorchRunner:
    """Implements `ModelRunner`."""

    def __init__(
        self,
        forward: ForwardPass,
        cache: KvCache,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._edits = LogitEdits(vocab_size, eos_token_ids)

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """One forward pass. If it fails, each chunk gets one of its own, so that only those fail that have to."""
        try:
            return self._run(plan)
        except RankLost:
            raise  # there is no forward pass any more
        except Exception:  # whatever one sequence brings about, the others go on
            if len(plan.chunks) == 1:
                raise
            log.exception("step failed, running its chunks one by one", chunks=len(plan.chunks))
        return [self._run_alone(chunk) for chunk in plan.chunks]

    def copy_blocks(self, pairs: Items[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._cache.tensor[target] = self._cache.tensor[source]

    def warm_up(self, max_step_tokens: int) -> None:
        """Run a prompt and a decode step, so that the first request does not pay for what torch sets up on first use.
        Writes into the first blocks; call before anything is in them.
        """
        room = min(2, self._cache.num_blocks) * self._cache.block_size_tokens
        num_tokens = max(1, min(room - 1, max_step_tokens))
        sampling = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0)
        sequence = Sequence("warm-up", [0] * num_tokens, num_tokens, sampling, root=b"")
        sequence.block_ids = list(range(min(2, self._cache.num_blocks)))
        self.run(StepPlan([Chunk(sequence, 0, num_tokens)]))
        sequence.token_ids.append(0)
        self.run(StepPlan([Chunk(sequence, num_tokens, 1)]))
        self._cache.tensor[: len(sequence.block_ids)] = 0

    def _run_alone(self, chunk: Chunk) -> ChunkResult:
        try:
            return self._run(StepPlan([chunk]))[0]
        except RankLost:
            raise
        except Exception as error:  # as above
            log.exception("chunk failed", sequence=chunk.sequence.id)
            return ChunkResult(error=InternalError(f"the model failed: {error}"))

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> list[ChunkResult]:
        last_rows = self._forward.run(plan)
        prompts: list[Items[TokenLogprobs]] = [
            self._prompt_logprobs(chunk, last_row) if chunk.sequence.lacks_prompt_logprobs else ()
            for chunk, last_row in zip(plan.chunks, last_rows, strict=True)
        ]
        drawing = [
            (chunk.sequence, choice, row)
            for chunk, row in zip(plan.chunks, last_rows, strict=True)
            if chunk.samples
            for choice in chunk.sequence.choices
        ]
        outcomes: list[_Outcome] = []
        if drawing:
            logits_NV = self._forward.logits([row for _, _, row in drawing])
            outcomes = self._draw(logits_NV, [(sequence, choice) for sequence, choice, _ in drawing])
        return _results(plan, prompts, outcomes)

    def _draw(self, logits_NV: torch.Tensor, wanted: list[tuple[Sequence, int]]) -> list[_Outcome]:
        """A token or an error for each row, that of (sequence, choice)."""
        errors = _not_finite(logits_NV)
        told = [row for row, (sequence, _) in enumerate(wanted) if sequence.sampling.logprobs is not None]
        as_given = logits_NV[told].clone() if told else logits_NV
        errors = self._edits.apply(logits_NV, [sequence for sequence, _ in wanted]) | errors
        for row in errors:
            logits_NV[row] = 0.0  # anything that can be drawn from
        draws = [Draw(sequence.sampling, sequence.num_output_tokens, choice) for sequence, choice in wanted]
        tokens = sample(logits_NV, draws)
        entries: dict[int, TokenLogprobs] = {}
        if told:
            numbers = [wanted[row][0].sampling.logprobs or 0 for row in told]
            found = logprobs(as_given, [tokens[row] for row in told], numbers)
            entries = dict(zip(told, found, strict=True))
        return [errors.get(row) or Drawn(token, entries.get(row)) for row, token in enumerate(tokens)]

    def _prompt_logprobs(self, chunk: Chunk, last_row: int) -> list[TokenLogprobs]:
        """Of the prompt's tokens that follow the chunk's, those that were reported before left out."""
        sequence = chunk.sequence
        end = min(chunk.start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
        positions = range(max(chunk.start, sequence.num_prompt_logprobs), end)
        first_row = last_row + 1 - chunk.num_tokens - chunk.start  # of position 0, if it were in this step
        found: list[TokenLogprobs] = []
        for some in (positions[i : i + _PROMPT_ROWS] for i in range(0, len(positions), _PROMPT_ROWS)):
            logits_RV = self._forward.logits([first_row + position for position in some])
            token_ids = sequence.token_ids[some.start + 1 : some.stop + 1]
            found += logprobs(logits_RV, token_ids, [sequence.sampling.prompt_logprobs or 0] * len(some))
        return found


def _not_finite(logits_NV: torch.Tensor) -> dict[int, HeadraceError]:
    """Errors by row."""
    values_NV = logits_NV.numpy()  # whose reductions are several times as fast
    bad_N = ~(np.isfinite(values_NV.min(axis=1)) & np.isfinite(values_NV.max(axis=1)))  # NaN wins both
    return {
        row: InternalError("the model gave logits that are not finite")
        for row in np.flatnonzero(bad_N).tolist()
    }


def _results(
    plan: StepPlan, prompts: list[Items[TokenLogprobs]], outcomes: list[_Outcome]
) -> list[ChunkResult]:
    """`outcomes` has one for each choice of each chunk that samples."""
    results: list[ChunkResult] = []
    rest = iter(outcomes)
    for chunk, prompt in zip(plan.chunks, prompts, strict=True):
        own = [next(rest) for _ in chunk.sequence.choices] if chunk.samples else []
        drawn = [outcome for outcome in own if isinstance(outcome, Drawn)]
        error = next((outcome for outcome in own if isinstance(outcome, HeadraceError)), None)
        results.append(ChunkResult(drawn, prompt, error))
    return results
