"""What is needed of a tokenizer, and the loading of one from a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.core.errors import InputError

# `content` is text or a list of text parts {"type": "text", "text": ...}.
ChatMessage = Mapping[str, object]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    clean_up_tokenization_spaces: bool

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds or without."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids."""

    def apply_chat_template(
        self, conversation: Sequence[ChatMessage], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """The conversation as the model was trained to read it."""


def load_tokenizer(folder: str) -> Tokenizer | None:
    """The tokenizer of a model folder; None if the folder has none (random checkpoints)."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((Path(folder) / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    # Cleaning up takes back spaces that a stream has already shown.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
