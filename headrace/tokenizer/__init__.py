"""Text to token ids and back: tokenizer, chat template, incremental detokenizer with stop strings.

Torch-free; used by the router.
"""

from headrace.tokenizer.chat_template import ChatMessage, ChatOptions, ToolCall
from headrace.tokenizer.detokenizer import IncrementalDetokenizer
from headrace.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatMessage",
    "ChatOptions",
    "IncrementalDetokenizer",
    "Tokenizer",
    "ToolCall",
    "load_tokenizer",
]
