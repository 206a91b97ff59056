"""The tokenizer that the router uses: one form for GGUF files and Hugging Face folders.

Loaded once at start, then only read. Special tokens written out in a text (`<|im_end|>`) become their one id, in chats
and in raw prompts, whoever wrote them: that is how templates work, and what other servers do. Whoever passes on foreign
text and must not let it end a turn has to filter it first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace import gguf_metadata
from headrace.errors import InvalidRequest, ModelError
from headrace.model_config import ModelFiles
from headrace.tokenizer import gguf, hf_folder
from headrace.tokenizer.chat_template import ChatMessage, ChatOptions, ChatTemplate
from headrace.tokenizer.vocabulary import Vocabulary

_SPECIAL_IN_TEMPLATE = re.compile(r"<\|[A-Za-z0-9_]+\|>|<(?:start|end)_of_turn>")

_WAITING = ChatOptions()  # for the assistant's answer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises ModelError for a tokenizer that is not supported."""
    if files.format == "gguf":
        vocabulary = gguf.read_vocabulary(gguf_metadata.read(files.path))
    else:
        vocabulary = hf_folder.read_vocabulary(files.path)
    num_tokens, num_embeddings = len(vocabulary.token_bytes), files.config.vocab_size
    if num_tokens > num_embeddings:
        raise ModelError(f"model {files.name}: {num_tokens} tokens, but embeddings for {num_embeddings} only")
    return Tokenizer(vocabulary)


class Tokenizer:
    """Thread-safe once made. A prompt begins with BOS exactly once if the model wants one, else as the text says."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        # Control tokens are written out in templates and must be found there.
        self._backend.encode_special_tokens = False
        self._token_bytes = vocabulary.token_bytes
        self._bos_id = vocabulary.bos_id if vocabulary.adds_bos else None
        self._template = self._compiled(vocabulary)
        self.strips_leading_space = vocabulary.strips_leading_space

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text. The model's embedding can have more rows than that."""
        return len(self._token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to an answer's text: b"" for control tokens and for ids without a text."""
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""

    def shown_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, but the name of a control token: what a person is to see of it."""
        return self.token_bytes(token_id) or (self._backend.id_to_token(token_id) or "").encode()

    def control_id(self, name: str) -> int | None:
        """The id of the control token of this name, if there is one."""
        token_id = self._backend.token_to_id(name)
        return None if token_id is None or self.token_bytes(token_id) else token_id

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids. `add_special`: begin with BOS if the model wants it and the text does not begin with it."""
        try:
            # Unlike `encode`, this lets other threads run meanwhile, and keeps no offsets.
            token_ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:  # the Rust side takes no lone surrogate for text
            raise InvalidRequest("prompt", text, "must be valid Unicode text") from None
        if add_special and self._bos_id is not None and token_ids[:1] != [self._bos_id]:
            return [self._bos_id, *token_ids]
        return token_ids

    def apply_chat_template(self, messages: Sequence[ChatMessage], options: ChatOptions = _WAITING) -> str:
        """The chat as the model's template writes it. Raises InvalidRequest if there is none, or it refuses."""
        if self._template is None:
            raise InvalidRequest(
                "chat", f"{len(messages)} messages", "the model has no chat template; send text instead"
            )
        return self._template.render(messages, options)

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = _WAITING) -> list[int]:
        """Token ids of a chat; without options one that waits for the assistant's answer."""
        return self.encode(self.apply_chat_template(messages, options), add_special=True)

    def _compiled(self, vocabulary: Vocabulary) -> ChatTemplate | None:
        source = vocabulary.chat_template
        if not source:
            return None
        for text in sorted(set(_SPECIAL_IN_TEMPLATE.findall(source))):
            # A file whose control tokens are marked as ordinary text would let the model see a turn's end in pieces.
            # A string that is no token at all may stand in a branch for another model: that is not ours to judge.
            if self._backend.token_to_id(text) is not None and len(self.encode(text, add_special=False)) != 1:
                raise ModelError(
                    f"the chat template uses {text!r}, which is a token but is not marked as a control token"
                )
        return ChatTemplate(
            source, bos_token=self._text(vocabulary.bos_id), eos_token=self._text(vocabulary.eos_id)
        )

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""
