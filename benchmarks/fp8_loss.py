"""Where a small model's loss to 8-bit floats arises, and how well a text can tell.

    python benchmarks/fp8_loss.py --model SMOLLM2_FOLDER --out FILE

HF in float32 with the engine's own rounding on the inputs and matrices of every projection, against
the same model unrounded. The standard error is that of the paired differences between tokens:
without it, a rise on a few hundred tokens cannot be told from luck.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.layers.fp8 import FP8, FP8_MAX, SMALLEST_AMAX
from golden.fp8 import register_kv_attention
from golden.quantised_text import fixed_text
from golden.reference import attention_of, load_hf

REPOSITORY = Path(__file__).resolve().parents[1]
PIECES = ("docs/numerics.md", "LICENSE", "docs/golden.md", "README.md")
PIECE_TOKENS, PER_FILE = 400, 2
# The factor at which the largest number of a group rounds worst: 448 / 1.682 = 266.4 -> 256.
WORST_STRETCH = 2**0.75


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is rounded; 0 stands for not at all, -1 for one scale per row, else columns a scale."""

    weights: int = 0
    activations: int = 0
    has_kv: bool = False
    stretch: float = 1.0
    keeps_largest: bool = False


CASES = {
    "weights": Rounding(weights=-1),
    "activations": Rounding(activations=-1),
    "kv": Rounding(has_kv=True),
    "weights and activations": Rounding(-1, -1),
    "all (what the engine does)": Rounding(-1, -1, True),
    "activations by 64": Rounding(activations=64),
    "weights, activations by 64": Rounding(-1, 64),
    "both by 64": Rounding(64, 64),
    "both by 64 and kv": Rounding(64, 64, True),
    "activations stretched": Rounding(activations=-1, stretch=WORST_STRETCH),
    "stretched, largest kept": Rounding(activations=-1, stretch=WORST_STRETCH, keeps_largest=True),
}


def rounded(x: Tensor, columns: int, how: Rounding) -> Tensor:
    """`x` as its nearest 8-bit floats times a scale per `columns` columns of a row."""
    groups = x.view(*x.shape[:-1], -1, x.shape[-1] if columns < 0 else columns)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = largest.clamp(min=SMALLEST_AMAX) / FP8_MAX * how.stretch
    found: Tensor = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
    if how.keeps_largest:
        found = torch.where(groups.abs() == largest, groups, found)
    return found.flatten(-2)


@contextmanager
def rounding(model: nn.Module, how: Rounding, kv_attention: str) -> Iterator[None]:
    """Makes HF round as `how` says."""

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(inputs[0], how.activations, how), *inputs[1:])

    matrices = [
        module
        for name, module in model.named_modules()
        if name.endswith("_proj") and isinstance(module, nn.Linear)
    ]
    before = [module.weight.data for module in matrices]
    hooks = [m.register_forward_pre_hook(hook) for m in matrices if how.activations]
    if how.weights:
        for module in matrices:
            module.weight.data = rounded(module.weight.data, how.weights, how)
    try:
        with attention_of(model, kv_attention) if how.has_kv else nullcontext():
            yield
    finally:
        for handle in hooks:
            handle.remove()
        for module, weight in zip(matrices, before, strict=True):
            module.weight.data = weight


def losses(model: nn.Module, texts: list[tuple[int, ...]]) -> Tensor:
    """Each token's negative log-probability, float32."""
    parts = []
    for text in texts:
        tokens = torch.tensor([text])
        logits = model(tokens).logits[0, :-1].float()
        parts.append(functional.cross_entropy(logits, tokens[0, 1:], reduction="none"))
    return torch.cat(parts)


def long_texts(folder: Path) -> list[tuple[int, ...]]:
    """Pieces of this repository's own prose, as the model's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    pieces = []
    for name in PIECES:
        ids = tokenizer.encode((REPOSITORY / name).read_text(encoding="utf-8"))
        starts = range(0, PIECE_TOKENS * PER_FILE, PIECE_TOKENS)
        pieces += [tuple(ids[start : start + PIECE_TOKENS]) for start in starts]
    return pieces


@torch.inference_mode()
def measure(folder: Path) -> list[dict[str, object]]:
    """One row per case and text."""
    model, kv_attention = load_hf(folder, torch.float32), register_kv_attention()
    texts = {"fixed": [s.tokens for s in fixed_text(folder)], "long": long_texts(folder)}
    plain = {name: losses(model, text) for name, text in texts.items()}
    rows: list[dict[str, object]] = []
    for label, how in CASES.items():
        for name, text in texts.items():
            with rounding(model, how, kv_attention):
                more = losses(model, text) - plain[name]
            rise, error = math.expm1(float(more.mean())), float(more.std()) / len(more) ** 0.5
            rows.append(
                {"case": label, "text": name, "tokens": len(more), **asdict(how)}
                | {"rise": round(rise, 5), "standard_error": round(error, 5)}
            )
            print(f"{label:28} {name:6} {100 * rise:+.2f} % +- {100 * error:.2f}", flush=True)
    return rows


def main() -> None:
    """Measures and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    record = {
        "command": "python benchmarks/fp8_loss.py --model SMOLLM2_FOLDER --out FILE",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "device": "cpu, 1 thread",
        "rows": measure(arguments.model),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
