"""What prompts consist of: pieces whose tokens follow from the seed and a number, so equal numbers are equal tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import InvalidRequest

_TEXT = """
able air all and any arm art ask bad bag ball bank base bear bed best big bird blue boat body bone book
born both box boy bring build bus buy call camp can car card care case cat cause city clear close coat
cold come cook cool corn cost cut dark day deal deep desk dog door down draw dream dress drive drop dry
duck each ear earth east easy eat edge egg end eye face fact fair fall far farm fast fear feel few field
fill film find fine fire fish five flat floor flow fly food foot form four free fresh full game garden
gate gift girl give glass goat gold good grass great green ground group grow hair half hand hard hat head
hear heart heat help high hill hold home hope horse hot hour house ice idea iron jump keep key kind king
lake lamp land large last late law lead leaf learn leave left leg less light line lion list live long
look lost low make man map mark milk mind moon more move much music name near neck need new next night
nine north note oil old one open paper park part pay peace pen plan plant play point pool poor post press
pull push queen quick race rain read red rest rice rich ride ring river road rock roof room root rose
round salt same sand save school sea seat seed sell send seven shape ship shoe short side silver six sky
sleep slow small snow soft song south stand star stone street strong sun sweet table tall tea ten three
tide time town tree true turn two under up use valley very voice wait walk wall warm wash watch water
wave way week west wheel white wide wind window winter wood word work world year yellow young
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens. `answer_to`: it stands for the answer to that turn of its conversation, and gives way to the
    answer that was really given, where that is known.
    """

    content: int
    num_tokens: int
    answer_to: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Draws the tokens of pieces. The middle of the vocabulary is used: control tokens stand at its ends.

    `phase`: equal pieces of two phases are different tokens, so that one does not find the other's in a cache.
    """

    seed: int
    size: int
    phase: int = 0

    def __post_init__(self) -> None:
        if self.size < 16:
            raise InvalidRequest("--vocab-size", self.size, "must be at least 16")

    def token_ids(self, piece: Piece) -> list[int]:
        low, high = self.size // 8, self.size - self.size // 8
        return self._draw(piece, low, high)

    def text(self, piece: Piece) -> str:
        """English words, about a token each."""
        return " ".join(_WORDS[word] for word in self._draw(piece, 0, len(_WORDS)))

    def _draw(self, piece: Piece, low: int, high: int) -> list[int]:
        rng = np.random.default_rng([self.seed, self.phase, piece.content])
        drawn: Any = rng.integers(low, high, piece.num_tokens)
        return drawn.tolist()


class SharedPrefixes:
    """A cache that never evicts: how much of each prompt is the beginning of an earlier one."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def cached_tokens(self, pieces: Sequence[Piece]) -> int:
        """Of the leading pieces that were seen together before; all of `pieces` have been seen from now on."""
        cached = 0
        for piece, chain in zip(pieces, _chained(pieces), strict=True):
            if chain not in self._seen:
                break
            cached += piece.num_tokens
        self.add(pieces)
        return cached

    def add(self, pieces: Sequence[Piece]) -> None:
        self._seen.update(_chained(pieces))


def _chained(pieces: Sequence[Piece]) -> Iterator[int]:
    """A name for each piece with all before it."""
    chain = 0
    for piece in pieces:
        chain = hash((chain, piece.content, piece.num_tokens))
        yield chain
