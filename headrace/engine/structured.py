"""Structured output: keeps a sequence's answer inside its grammar, with llguidance.

    Grammar ──GrammarCompiler.compile_within (before admission, any thread)──▶ Constraint, one per sequence
    each step, engine thread:  fill_mask ──▶ sampler ──▶ accept

A constraint that fails raises InternalError for its own sequence; it never allows everything. Sequences of one grammar
share what its lexer has learned, which saves each of them a cold start. The lexer's limits are then shared as well, so
a sequence that finds its matcher failed goes on with one that is its own, and later ones start anew.

llguidance releases the GIL while it compiles and while it fills masks.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace import grammar as grammars
from headrace.errors import HeadraceError, InternalError, InvalidRequest, ModelError, Overloaded
from headrace.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")

NUM_COMPILERS = 2
MAX_CACHED_GRAMMARS = 32

# llguidance recurses once per level of what a grammar refers to: 64 KiB of text reach levels that overflow the usual 8
# MiB, which would end the process. Only what is used of it becomes memory.
_STACK_BYTES = 256 * 2**20
_STACK_SIZE_LOCK = threading.Lock()

# The engine's other sequences wait for a step. An ambiguous grammar costs the square of a row's items, half a second at
# llguidance's defaults, tens of milliseconds here; a large schema has wide steps that cost a few milliseconds, and is
# let through.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 600,
    "step_max_items": 20_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# llguidance counts remainders, one lexer state each: 200 bytes and 2 µs. None of its limits bounds that.
_MAX_DIVISOR = 200_000
_MAX_REASON_CHARACTERS = 300

# Between two tokens of JSON. Without a bound a model can write blanks until its answer's limit.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
_NO_FORCING = '%llguidance {"no_forcing": true}\nstart: @answer'


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class GrammarCompiler:
    """One per model. Thread-safe."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        num_compilers: int = NUM_COMPILERS,
        max_cached: int = MAX_CACHED_GRAMMARS,
    ) -> None:
        """`vocab_size`: rows of the model's logits, which can be more than the tokenizer has tokens. Takes a fifth of a
        second for 50,000 tokens. Raises ModelError for a model without an end of text: no answer could be complete.
        """
        if not eos_token_ids:
            raise ModelError("structured output needs an end-of-text token, and the model has none")
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        if not eos_token_ids:
            raise InvalidRequest(
                "grammar", "", "the model declares no end-of-text token, with which an answer could end"
            )
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=sorted(eos_token_ids))
        self._vocab_size = vocab_size
        self._limits = LLParserLimits(**_LIMITS)
        self._num_compilers = num_compilers
        self._max_cached = max_cached
        self._changed = threading.Condition()  # guards the two below
        self._cache: OrderedDict[Grammar, _Compiled] = OrderedDict()  # least recently used first
        self._jobs: dict[Grammar, _Job] = {}

    def compile(self, grammar: Grammar) -> Constraint:
        """However long it takes. Raises InvalidRequest for a grammar that can not be used."""
        grammars.check(grammar)
        compiled = self._cached(grammar)
        if compiled is None:
            compiled = _on_deep_stack(lambda: self._compiled(grammar)).result()
        return Constraint(compiled, self._vocab_size)

    def compile_within(self, grammar: Grammar, timeout_s: float) -> Constraint:
        """Blocks at most `timeout_s` until a compiler is free, and as long for the compilation itself.

        Raises Overloaded when none gets free, at once if all are stuck, and InvalidRequest for a grammar that can not
        be used or takes longer.
        """
        grammars.check(grammar)
        compiled = self._cached(grammar)
        if compiled is None:
            job = self._job(grammar, timeout_s)
            try:
                compiled = job.future.result(job.left_s(timeout_s))
            except TimeoutError:
                self._give_up(job)
                raise InvalidRequest(
                    "grammar",
                    grammar.text,
                    f"{grammar.kind}: takes too long to compile (limit {timeout_s:g} s)",
                ) from None
        return Constraint(compiled, self._vocab_size)

    def _cached(self, grammar: Grammar) -> _Compiled | None:
        with self._changed:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
            return compiled

    def _job(self, grammar: Grammar, timeout_s: float) -> _Job:
        """The compilation of this grammar that is under way, or a new one as soon as there is room."""
        with self._changed:
            self._changed.wait_for(
                lambda: grammar in self._jobs or self._has_room or self._is_stuck, timeout_s
            )
            if grammar in self._jobs:
                return self._jobs[grammar]
            if not self._has_room:
                raise Overloaded(f"all {self._num_compilers} grammar compilers are busy")
            job = self._jobs[grammar] = _Job()
        job.future.add_done_callback(lambda _: self._finished(grammar))
        _on_deep_stack(lambda: self._compiled(grammar), job.future)
        return job

    @property
    def _has_room(self) -> bool:
        return len(self._jobs) < self._num_compilers

    @property
    def _is_stuck(self) -> bool:
        return all(job.overdue for job in self._jobs.values())

    def _give_up(self, job: _Job) -> None:
        """Nothing stops a compilation; it keeps its place until it ends, and then its result is still of use."""
        with self._changed:
            job.overdue = True
            self._changed.notify_all()

    def _finished(self, grammar: Grammar) -> None:
        with self._changed:
            del self._jobs[grammar]
            self._changed.notify_all()

    def _compiled(self, grammar: Grammar) -> _Compiled:
        compiled = _Compiled(functools.partial(self._matcher, _definition(grammar)))
        if reason := compiled.try_out():
            raise InvalidRequest("grammar", grammar.text, f"{grammar.kind}: can not be compiled: {reason}")
        with self._changed:
            self._cache[grammar] = compiled
            self._cache.move_to_end(grammar)
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        return compiled

    def _matcher(self, definition: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, definition, log_level=0, limits=self._limits)


class Constraint:
    """One sequence's place in its grammar. Used by the engine thread only."""

    def __init__(self, compiled: _Compiled, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._matcher = compiled.matcher()
        self._is_alone = False  # whether no other sequence shares the matcher's lexer
        self._token_ids: list[int] = []

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but an end of text can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        """Set bit `i % 32` of word `i // 32` for every token id `i` that may come next, clear all others.

        `row`: uint32 [ceil(vocab_size / 32)], contiguous. End-of-text ids are allowed exactly where the answer is
        complete. Raises InternalError, and leaves an empty row, if the grammar is too complex to go on.
        """
        self._fill(row)
        self._check_filled(row)

    def accept(self, token_id: int) -> None:
        """Go on behind this token. Raises InternalError if it is not allowed, or the grammar is too complex."""
        if not 0 <= token_id < self._vocab_size:
            raise InternalError(f"token {token_id} is outside the vocabulary of {self._vocab_size}")
        if not self._matcher.consume_token(token_id):
            self._recover()
            if not self._matcher.consume_token(token_id):
                raise self._failure(f"token {token_id} can not follow")
        self._token_ids.append(token_id)

    def fresh(self) -> Constraint:
        """For another sequence with the same grammar, at its beginning."""
        return Constraint(self._compiled, self._vocab_size)

    def _fill(self, row: NDArray[np.uint32]) -> None:
        _check_rows(row)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)  # checks the width

    def _check_filled(self, row: NDArray[np.uint32]) -> None:
        """A matcher that fails writes a mask all the same."""
        if not self._matcher.is_error():
            return
        try:
            self._recover()
            self._fill(row)
            if self._matcher.is_error():
                raise self._failure("no mask")
        except InternalError:
            row[:] = 0
            raise

    def _recover(self) -> None:
        """The shared lexer may have met its limits in another sequence: once, go on with a matcher of our own."""
        if self._is_alone:
            raise self._failure("failed before")
        self._matcher, self._is_alone = self._compiled.matcher_alone(), True
        if self._token_ids and not self._matcher.consume_tokens(self._token_ids):
            raise self._failure(f"{len(self._token_ids)} tokens can not be replayed")

    def _failure(self, what: str) -> InternalError:
        return InternalError(
            f"structured output failed after {len(self._token_ids)} tokens: {what}: "
            f"{_reason(self._matcher.get_error())}"
        )


def _check_rows(rows: NDArray[np.uint32]) -> None:
    """Their address is handed to Rust, which checks the width of a row, and nothing else."""
    assert rows.dtype == np.uint32 and rows.flags.c_contiguous and rows.flags.writeable


class _Compiled:
    """A grammar and its first matcher, from which each sequence takes a copy. Copies share the lexer's state, its
    failures among them.
    """

    def __init__(self, build: Callable[[], LLMatcher]) -> None:
        """`build` is called on a deep stack."""
        self._build = build
        self._first: LLMatcher | None = build()

    def try_out(self) -> str:
        """Why no answer can even begin; "" if one can. Warms the lexer up."""
        assert self._first is not None
        if not self._first.is_error():
            self._first.compute_bitmask()
        return _reason(self._first.get_error())

    def matcher(self) -> LLMatcher:
        first = self._first
        if first is None:
            first = self._first = _on_deep_stack(self._build).result()
        return first.deep_copy()

    def matcher_alone(self) -> LLMatcher:
        """For a sequence whose matcher has failed, perhaps for another's sake: shared with nobody."""
        self._first = None  # its lexer is what failed
        return _on_deep_stack(self._build).result()


@dataclass(slots=True, eq=False)
class _Job:
    """A compilation under way."""

    future: Future[_Compiled] = field(default_factory=Future)
    started_s: float = field(default_factory=time.monotonic)
    overdue: bool = False  # a caller has waited for it in vain

    def left_s(self, timeout_s: float) -> float:
        return 0.0 if self.overdue else max(0.0, self.started_s + timeout_s - time.monotonic())


def _on_deep_stack(call: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
    """Run it in a thread of its own that no recursion of llguidance overflows, and that does not delay an exit."""
    outcome: Future[T] = Future() if future is None else future

    def run() -> None:
        try:
            result = call()
        except HeadraceError as error:
            outcome.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception; whoever waits hears of it
            outcome.set_exception(InternalError(f"the grammar compiler failed: {error!r}"))
        else:
            outcome.set_result(result)

    thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
    with _STACK_SIZE_LOCK:
        size = threading.stack_size(_STACK_BYTES)  # of all threads that are started from now on
        try:
            thread.start()
        except RuntimeError as error:
            outcome.set_exception(Overloaded(f"no thread for the grammar compiler: {error}"))
        finally:
            threading.stack_size(size)
    return outcome


class _Vocabulary:
    """The model's tokens as llguidance wants them: bytes by id, empty for what must never be sampled as text."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: TokenBytes, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_id = min(eos_token_ids)
        # What ends an answer has no text here, even where the model's file gives it one.
        self.tokens = [
            b"" if token_id in eos_token_ids else tokenizer.token_bytes(token_id)
            for token_id in range(vocab_size)
        ]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("forced text is not tokenized: see _definition")


def _definition(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Its own way to begin with is to find text that is forced, tokenize that, and allow the first token only; which takes
    a tokenizer, and for text that is long, milliseconds per token. Here any tokens that spell the text are allowed.
    """
    answer = {"name": "answer", **_answer(grammar)}
    return json.dumps({"grammars": [{"lark_grammar": _NO_FORCING}, answer]})


def _answer(grammar: Grammar) -> dict[str, Any]:
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = grammars.schema(grammar)
            if (divisor := _common_divisor(schema)) > _MAX_DIVISOR:
                raise InvalidRequest(
                    "grammar",
                    f"multipleOf {divisor}",
                    f"the least common multiple of all is at most {_MAX_DIVISOR}",
                )
            return {"json_schema": _with_options({} if isinstance(schema, bool) else schema)}
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": _with_options({"type": "object"})}
        case GrammarKind.REGEX:
            return {
                "lark_grammar": json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0][
                    "lark_grammar"
                ]
            }
        case GrammarKind.CHOICE:
            # One terminal: a state machine, however many there are.
            texts = " | ".join(map(_lark_string, grammars.choices(grammar)))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
        case GrammarKind.LARK:
            return {"lark_grammar": grammar.text}


def _common_divisor(schema: object) -> int:
    """Least common multiple of all `multipleOf` in a schema, in units of their last decimal.

    Of all: references and allOf can make any of them meet in one number.
    """
    found: list[Decimal] = []
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += node.values()
            number = node.get("multipleOf")
            if isinstance(number, int | float) and number > 0:
                found.append(Decimal(str(number)))
        elif isinstance(node, list):
            nodes += node
    decimals = max((-int(number.normalize().as_tuple().exponent) for number in found), default=0)
    return math.lcm(*(int(number.scaleb(max(decimals, 0))) for number in found))


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema may choose how its JSON is laid out, and not that what we do not support is ignored."""
    chosen = schema.get("x-guidance", {})
    if not isinstance(chosen, dict):
        return schema
    return {**schema, "x-guidance": {**_JSON_OPTIONS, **chosen, "lenient": False}}


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _reason(error: str) -> str:
    """llguidance's message on one line, less the parser's state and the stack that can follow it."""
    for mark in ("<state>", "<non-verbose/>", "<backtrace>"):
        error = error.partition(mark)[0]
    return " ".join(error.split()).replace("NoExtensionBias", "nothing matches it")[:_MAX_REASON_CHARACTERS]
