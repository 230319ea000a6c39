"""Model shapes, prompts and token sequences of the golden suites; pure data, no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

_TINY: dict[str, Any] = {
    "vocab_size": 151,  # prime: neither aligned nor divisible by any number of ranks
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model of random weights: an HF family and its config's settings."""

    name: str
    family: str  # HF's name: Qwen3, Qwen3Moe, Qwen2, Qwen2Moe, Llama, Mistral or Mixtral
    settings: dict[str, Any] = field(hash=False)
    weight_std: float = 0.12
    norm_spread: float = 0.5  # norm weights are uniform in 1 +- spread
    # Exponent of the Pareto lengths of the head's rows; None leaves them equal. Equal rows of a
    # large vocabulary give flat logits, whose best two are too close to judge a token by.
    head_tail: float | None = None
    head_scale: float = 1.0  # keeps the largest logits, and so KL, in the usual range
    branch_scale: float = 1.0  # factor of the matrices that write to the residual stream
    embedding_std: float | None = None  # None: like any other weight
    # Deviation of an untied head whose row t + 1 points where the embedding of t points: then
    # what is left of the embedding in the residual stream speaks for one token.
    head_from_embedding: float | None = None
    # Experts 2 i and 2 i + 1 are one: their scores tie for every token.
    twin_experts: bool = False


def _tiny(name: str, family: str, **changes: object) -> ModelCase:
    settings = {**_TINY, **changes}
    if family == "Qwen3":
        settings.setdefault("head_dim", 16)
    return ModelCase(name, family, settings)


def _sparse(name: str, family: str, twin_experts: bool = False, **changes: object) -> ModelCase:
    settings = {**_TINY, **changes}
    if family == "Qwen3Moe":
        settings["head_dim"] = 16
    return ModelCase(name, family, settings, twin_experts=twin_experts)


_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


TINY_MODELS = (
    _tiny("qwen3-gqa-tied", "Qwen3", tie_word_embeddings=True),
    _tiny("qwen3-untied-bias-yarn", "Qwen3", attention_bias=True, rope_parameters=YARN_ROPE),
    _tiny("qwen3-wide-head", "Qwen3", head_dim=32, num_key_value_heads=2),
    _tiny(
        "qwen3-head-64",
        "Qwen3",
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    ),
    _tiny("qwen2-bias", "Qwen2"),
    _tiny("qwen2-tied-mha", "Qwen2", tie_word_embeddings=True, num_key_value_heads=8),
    _tiny("llama-gqa", "Llama"),
    _tiny("llama-llama3-rope", "Llama", rope_parameters=LLAMA3_ROPE),
    _tiny("llama-all-bias", "Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    _tiny("llama-linear-rope", "Llama", rope_parameters=LINEAR_ROPE, tie_word_embeddings=True),
    _tiny("mistral", "Mistral", sliding_window=None, head_dim=16),
    _sparse("qwen3-moe", "Qwen3Moe", norm_topk_prob=True, **_QWEN_EXPERTS),
    _sparse(
        "qwen3-moe-dense-between",
        "Qwen3Moe",
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        **_QWEN_EXPERTS,
    ),
    _sparse("qwen3-moe-ties", "Qwen3Moe", norm_topk_prob=True, twin_experts=True, **_QWEN_EXPERTS),
    _sparse("qwen2-moe-shared", "Qwen2Moe", shared_expert_intermediate_size=48, **_QWEN_EXPERTS),
    _sparse("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
)


def tiny_model(name: str) -> ModelCase:
    """A tiny model by name."""
    return next(case for case in TINY_MODELS if case.name == name)


def with_heads_of_16(case: ModelCase) -> ModelCase:
    """The same model with fewer and wider heads, where a kernel takes no head of 8."""
    settings = case.settings
    if settings.get("head_dim", settings["hidden_size"] // settings["num_attention_heads"]) >= 16:
        return case
    changes = {"num_attention_heads": settings["hidden_size"] // 16, "num_key_value_heads": 2}
    return replace(case, name=f"{case.name}-head-16", settings={**settings, **changes})


def qwen3_shape(name: str) -> ModelCase:
    """The published shape of Qwen3-0.6B or Qwen3-8B."""
    shapes: dict[str, dict[str, Any]] = {
        "qwen3-0.6b": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "qwen3-8b": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    }
    settings = {
        **shapes[name],
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    return ModelCase(name, "Qwen3", settings, weight_std=0.02, **_CONSTRUCTIONS[name])


# How the large shapes get gaps that are wide against the error; docs/numerics.md compares.
_CONSTRUCTIONS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"head_tail": 4.0, "head_scale": 0.3, "branch_scale": 56**-0.5},
    "qwen3-8b": {"embedding_std": 2.0, "head_from_embedding": 0.01},
}


@dataclass(frozen=True, slots=True)
class ForcedSequence:
    """A request whose output tokens are given: the engine computes, but does not choose."""

    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids."""
        return self.prompt + self.forced

    @property
    def num_logits(self) -> int:
        """Positions that are computed: the last token is never fed back."""
        return len(self.prompt) + len(self.forced) - 1


def random_sequence(
    name: str, vocab_size: int, prompt_len: int, forced_len: int, seed: int
) -> ForcedSequence:
    """Uniform random ids; equal seeds share their beginning whatever the lengths."""
    ids = random.Random(f"golden {seed}")
    tokens = tuple(ids.randrange(3, vocab_size) for _ in range(prompt_len + forced_len))
    return ForcedSequence(name, tokens[:prompt_len], tokens[prompt_len:])


def random_batch(
    vocab_size: int, lengths: tuple[int, ...], forced_len: int
) -> list[ForcedSequence]:
    """Sequences around block and chunk boundaries, the last two sharing a long prefix."""
    batch = [
        random_sequence(f"random-{length}", vocab_size, length, forced_len, seed)
        for seed, length in enumerate(lengths)
    ]
    twin = batch[-1]
    keep = len(twin.prompt) - 3
    tail = random_sequence("tail", vocab_size, 3, forced_len, 999)
    shared = ForcedSequence(f"shared-prefix-{keep}", twin.prompt[:keep] + tail.prompt, tail.forced)
    return [*batch, shared]


PROMPTS = {
    "text": (
        "The lighthouse had stood on the cape for two hundred years, and for most of them somebody "
        "had climbed its stairs every evening to light the lamp. When the last keeper retired, the "
        "village held a dinner for him in the old customs house, and he told them what he had seen "
        "from the gallery: whales in spring, fog in autumn, and once, in a storm, three ships that"
    ),
    "chat": (
        "<|im_start|>system\nYou answer briefly and say so when you do not know.<|im_end|>\n"
        "<|im_start|>user\nWhich planet has the shortest day, and how long is it?<|im_end|>\n"
        "<|im_start|>assistant\nJupiter: it turns once in just under ten hours.<|im_end|>\n"
        "<|im_start|>user\nAnd which one has the longest?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "code": (
        "def merge(left, right):\n"
        '    """Merge two sorted lists into one sorted list."""\n'
        "    merged = []\n    i = j = 0\n"
        "    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n"
        "            merged.append(left[i])\n            i += 1\n"
        "        else:\n            merged.append(right[j])\n            j += 1\n"
        "    merged.extend(left[i:])\n    merged.extend(right[j:])\n    return"
    ),
    "multilingual": (
        "Der Zug nach München fährt um acht Uhr ab. Le marché ouvre tôt le samedi matin. "
        "La biblioteca cierra a las nueve. 今日は雨が降っています。"
        "Поезд опаздывает на десять минут. القهوة ساخنة. Η θάλασσα είναι ήρεμη. "
        "오늘은 날씨가 좋습니다. Ça va très bien, merci, and you?"
    ),
}

_SUBJECTS = ("The baker", "A young surveyor", "The river pilot", "My neighbour", "The archivist")
_VERBS = ("counted", "described", "repaired", "carried", "remembered", "sold")
_OBJECTS = ("seven copper kettles", "the northern road", "a box of letters", "two broken clocks")
_PLACES = ("behind the mill", "near the harbour", "in the long winter", "before the market opened")


def long_text(num_sentences: int) -> str:
    """Numbered plain sentences, always the same; about 13 tokens each."""
    pick = random.Random("long text 7").choice
    return " ".join(
        f"{number}. {pick(_SUBJECTS)} {pick(_VERBS)} {pick(_OBJECTS)} {pick(_PLACES)}."
        for number in range(1, num_sentences + 1)
    )
