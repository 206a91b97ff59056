"""What a sequence's settings and its tokens so far change about its logits: penalties, bias, and what is not allowed.

Letters: N rows of the batch, V vocabulary, E single entries of several rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import structlog
import torch

from headrace.engine.sequence import Constraint, Sequence
from headrace.errors import HeadraceError, InternalError, InvalidRequest
from headrace.sampling_params import SamplingParams

log = structlog.get_logger()

_WORD_BITS = 32


class LogitEdits:
    """Keeps what it counted of each sequence for as long as the sequence lives, and looks at new tokens only."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()
        self._constraints: WeakKeyDictionary[Sequence, _Progress] = WeakKeyDictionary()

    def apply(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> dict[int, HeadraceError]:
        """Change the rows in place. Returns errors of rows from which nothing can be drawn, by row."""
        if not any(_changes_logits(s) for s in sequences):
            return {}
        self._penalize(logits_NV, sequences)
        _add_bias(logits_NV, [s.sampling for s in sequences])
        _keep_allowed(logits_NV, [s.sampling for s in sequences])
        errors = self._constrain(logits_NV, sequences)
        self._forbid(logits_NV, sequences)
        for row in (logits_NV.amax(-1) == -torch.inf).nonzero().flatten().tolist():
            if row not in errors:
                errors[row] = _nothing_left(sequences[row])
        return errors

    def _penalize(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> None:
        rows, entries = [], []
        for row, sequence in enumerate(sequences):
            if _is_penalized(sequence.sampling):
                history = self._histories.get(sequence)
                if history is None:
                    history = self._histories[sequence] = _History(sequence, self._vocab_size)
                history.extend(sequence)
                rows.append(row)
                entries.append(history)
        if not rows:
            return
        sizes = [history.num_ids for history in entries]
        samplings = [sequences[row].sampling for row in rows]
        rows_E = torch.from_numpy(np.repeat(rows, sizes))
        ids_E = torch.from_numpy(np.concatenate([history.ids[: history.num_ids] for history in entries]))
        counts_E = torch.from_numpy(np.concatenate([history.counts_of_ids() for history in entries]))
        repetition_E = _repeated([s.repetition_penalty for s in samplings], sizes)
        presence_E = _repeated([s.presence_penalty for s in samplings], sizes)
        frequency_E = _repeated([s.frequency_penalty for s in samplings], sizes)
        values_E = logits_NV[rows_E, ids_E]
        values_E = torch.where(values_E > 0, values_E / repetition_E, values_E * repetition_E)
        logits_NV[rows_E, ids_E] = values_E - presence_E * (counts_E > 0) - frequency_E * counts_E

    def _constrain(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> dict[int, HeadraceError]:
        """Leave what the sequences' constraints allow. One that fails fails alone."""
        errors: dict[int, HeadraceError] = {}
        rows = [row for row, sequence in enumerate(sequences) if sequence.constraint is not None]
        if not rows:
            return errors
        words = np.zeros((len(rows), -(-self._vocab_size // _WORD_BITS)), dtype=np.uint32)
        for row, row_words in zip(rows, words, strict=True):
            try:
                self._at_end(sequences[row]).fill_mask(row_words)
            except HeadraceError as error:
                errors[row] = error
            except Exception as error:  # a library's: whatever it is, it is this sequence's alone
                log.exception("grammar failed", sequence=sequences[row].id)
                errors[row] = InternalError(f"the grammar failed: {error!r}")
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        logits_NV[rows] = logits_NV[rows].masked_fill_(torch.from_numpy(bits) == 0, -torch.inf)
        return errors

    def _at_end(self, sequence: Sequence) -> Constraint:
        """The sequence's constraint after all of its output."""
        progress = self._constraints.get(sequence)
        if progress is None:
            assert sequence.constraint is not None
            progress = self._constraints[sequence] = _Progress(sequence.constraint.fresh())
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + progress.num_accepted :]:
            progress.constraint.accept(token_id)
            progress.num_accepted += 1
        return progress.constraint

    def _forbid(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> None:
        rows: list[int] = []
        ids: list[int] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            forbidden = [*sampling.banned_token_ids]
            if sequence.num_output_tokens < sampling.min_tokens:
                forbidden += [*self._eos_token_ids, *sampling.stop_token_ids]
            rows += [row] * len(forbidden)
            ids += forbidden
        if ids:
            logits_NV[rows, ids] = -torch.inf


class _History:
    """The tokens of one sequence: which there are, and how often they are in its answer."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        prompt_ids = np.unique(sequence.token_ids[: sequence.num_prompt_tokens])
        self.num_ids = len(prompt_ids)
        self.ids = np.empty(min(vocab_size, self.num_ids + sequence.sampling.max_tokens), dtype=np.int64)
        self.ids[: self.num_ids] = prompt_ids
        self._is_known = np.zeros(vocab_size, dtype=np.bool_)
        self._is_known[prompt_ids] = True
        self._counts = np.zeros(vocab_size, dtype=np.int32)
        self._num_seen = sequence.num_prompt_tokens

    def extend(self, sequence: Sequence) -> None:
        """Count the tokens that came since the last time."""
        for token_id in sequence.token_ids[self._num_seen :]:
            self._counts[token_id] += 1
            if not self._is_known[token_id]:
                self._is_known[token_id] = True
                self.ids[self.num_ids] = token_id
                self.num_ids += 1
        self._num_seen = len(sequence.token_ids)

    def counts_of_ids(self) -> np.ndarray:
        return self._counts[self.ids[: self.num_ids]]


@dataclass(slots=True)
class _Progress:
    constraint: Constraint
    num_accepted: int = 0


def _changes_logits(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return bool(
        sequence.constraint is not None
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or sequence.num_output_tokens < sampling.min_tokens
        or _is_penalized(sampling)
    )


def _is_penalized(sampling: SamplingParams) -> bool:
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _repeated(values: list[float], sizes: list[int]) -> torch.Tensor:
    return torch.tensor(values).repeat_interleave(torch.tensor(sizes))


def _add_bias(logits_NV: torch.Tensor, samplings: list[SamplingParams]) -> None:
    entries = [(row, *bias) for row, sampling in enumerate(samplings) for bias in sampling.logit_bias]
    if entries:
        rows, ids, values = zip(*entries, strict=True)
        logits_NV.index_put_((torch.tensor(rows), torch.tensor(ids)), torch.tensor(values), accumulate=True)


def _keep_allowed(logits_NV: torch.Tensor, samplings: list[SamplingParams]) -> None:
    for row, sampling in enumerate(samplings):
        if sampling.allowed_token_ids:
            ids = torch.tensor(sampling.allowed_token_ids)
            kept = logits_NV[row, ids]
            logits_NV[row] = -torch.inf
            logits_NV[row, ids] = kept


def _nothing_left(sequence: Sequence) -> HeadraceError:
    limits = ("allowed_token_ids", "banned_token_ids", "min_tokens")
    given = ["grammar"] if sequence.constraint is not None else []
    given += [name for name in limits if getattr(sequence.sampling, name)]
    return InvalidRequest(given[0], "", f"{' and '.join(given)} leave no token to draw")
