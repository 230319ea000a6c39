"""What quantisation costs a real model: perplexity of a fixed text, and how often tokens differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from golden.cases import PROMPTS, ForcedSequence, long_text
from golden.forced import ForcedRunner
from golden.models import engine_options

TEXT_TOKENS = 320


@dataclass(frozen=True, slots=True)
class TextScore:
    """One run over the fixed text."""

    perplexity: float
    best: tuple[int, ...]  # the most likely token at every position

    def agreement(self, other: TextScore) -> float:
        """Share of positions at which both find the same token most likely."""
        same = sum(a == b for a, b in zip(self.best, other.best, strict=True))
        return same / len(self.best)


def fixed_text(folder: Path) -> list[ForcedSequence]:
    """Prose, a chat, code, other languages and numbered sentences, as the model's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = {**PROMPTS, "sentences": long_text(30)}
    sequences = []
    for name, text in texts.items():
        ids = [int(token) for token in tokenizer.encode(text)][:TEXT_TOKENS]
        sequences.append(ForcedSequence(name, tuple(ids[:-1]), tuple(ids[-1:])))
    return sequences


@torch.inference_mode()
def score_text(folder: Path, dtype: torch.dtype, device: str, **options: object) -> TextScore:
    """The engine's perplexity of the fixed text under some options."""
    settings = {"max_num_batched_tokens": 1024, "max_model_len": 512, **options}
    loss, best = 0.0, []
    with ForcedRunner(engine_options(folder, dtype, device, **settings), device=device) as runner:
        for name, item in runner.run(fixed_text(folder)).items():
            assert item.positions == list(range(len(item.positions))), name
            logits = runner.logits(item.hidden()).float()
            following = torch.tensor(item.sequence.tokens[1:], device=logits.device)
            loss += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
            best += logits.argmax(-1).tolist()
    return TextScore(math.exp(loss / len(best)), tuple(best))
