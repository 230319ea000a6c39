"""A tokenizer for models that are known by name only: words and pieces of words."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from engine.text.tokenizer import ChatMessage

# Special tokens, short pieces of words with the space before them, numbers, runs of spaces.
_PIECES = re.compile(r"<\|\w+\|>| ?[^\W\d_]{1,6}|[^\W\d_]{1,6}| ?\d{1,3}|\s+|.", re.DOTALL)
_FIRST_HASHED = 256
_MAX_REMEMBERED = 200_000


class PieceTokenizer:
    """About four letters a token, as in English with a trained vocabulary.

    Equal pieces have equal ids in every process, so prefixes are shared as they would be; an id
    is a hash, and has a text only if its piece was seen here (bytes of ASCII always have one).
    """

    clean_up_tokenization_spaces = False

    def __init__(self, vocab_size: int) -> None:
        self._num_hashed = vocab_size - _FIRST_HASHED
        self._texts: OrderedDict[int, str] = OrderedDict()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """One id per piece."""
        return [self._id(piece) for piece in _PIECES.findall(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The pieces behind each other; `<id>` where none is known."""
        return "".join(map(self._text, token_ids))

    def apply_chat_template(
        self, conversation: Sequence[ChatMessage], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """ChatML."""
        turns = [
            f"<|im_start|>{one.get('role')}\n{_content(one.get('content'))}<|im_end|>\n"
            for one in conversation
        ]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _id(self, piece: str) -> int:
        if len(piece) == 1 and ord(piece) < 128:
            return ord(piece)
        token_id = _FIRST_HASHED + xxhash.xxh32_intdigest(piece.encode()) % self._num_hashed
        self._texts[token_id] = piece
        self._texts.move_to_end(token_id)
        if len(self._texts) > _MAX_REMEMBERED:
            self._texts.popitem(last=False)
        return token_id

    def _text(self, token_id: int) -> str:
        if token_id < 128:
            return chr(token_id)
        return self._texts.get(token_id, f"<{token_id}>")


def _content(content: object) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)
