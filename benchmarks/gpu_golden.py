"""What the golden rules can see: random weights of the large shapes, and HF against itself.

    python3 benchmarks/gpu_golden.py constructions --shape qwen3-8b --out FILE
    python3 benchmarks/gpu_golden.py yardsticks --smollm2 FOLDER --out FILE

`constructions` runs a healthy engine and every planted defect on several constructions of the
weights. `yardsticks` puts HF's other implementations of attention in the engine's place, with HF's
default as the yardstick. With `--tiny` (and `--device cpu`) both run in seconds on small shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.commands.bench_common import current_commit
from golden.canaries import CANARIES
from golden.cases import qwen3_shape, random_batch, tiny_model
from golden.compare import LogitComparison
from golden.models import Reference, engine_options, rules_for, run_model
from golden.reference import (
    attention_of,
    cast,
    hf_logits,
    load_hf,
    quiet_transformers,
    random_hf_model,
    save_config,
)
from golden.smollm2 import MAX_CLOSE_SHARE, real_sequences

PLAIN = {
    "head_tail": None,
    "head_scale": 1.0,
    "branch_scale": 1.0,
    "embedding_std": None,
    "head_from_embedding": None,
}
UNTIED = {
    "Pareto 3": {"head_tail": 3.0, "head_scale": 0.05},
    "Pareto 2": {"head_tail": 2.0, "head_scale": 0.01},
    "Pareto 3, embedding 1": {"head_tail": 3.0, "head_scale": 0.05, "embedding_std": 1.0},
    "branch": {
        "head_tail": 4.0,
        "head_scale": 0.1,
        "branch_scale": 72**-0.5,
        "embedding_std": 1.0,
    },
    "pointing head, embedding 1": {"embedding_std": 1.0, "head_from_embedding": 0.01},
    "pointing head, embedding 1.4": {"embedding_std": 1.4, "head_from_embedding": 0.01},
    "pointing head, embedding 2": {"embedding_std": 2.0, "head_from_embedding": 0.01},
}
TIED = {
    "Pareto 4": {"head_tail": 4.0, "head_scale": 0.3},
    "branch": {"head_tail": 4.0, "head_scale": 0.3, "branch_scale": 56**-0.5},
}
BLOCK_SIZES = {"flash_attn": 256, "triton": 16, "torch": 16}
DTYPES = (torch.bfloat16, torch.float16)
ATTENTIONS = {"eager": None, "math": "MATH", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("constructions", "yardsticks"))
    parser.add_argument("--shape", default="qwen3-8b", choices=("qwen3-0.6b", "qwen3-8b"))
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    quiet_transformers()
    rows = {"constructions": constructions, "yardsticks": yardsticks}[args.what](args)
    record = {"what": args.what, "commit": current_commit(), "torch": torch.__version__, "rows": []}
    for row in rows:
        print({key: value for key, value in row.items() if key != "violations"}, flush=True)
        record["rows"].append(row)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def constructions(args):
    case = qwen3_shape(args.shape)
    lengths = (17, 256, 500)
    if args.tiny:
        name = "qwen3-gqa-tied" if args.shape == "qwen3-0.6b" else "qwen3-wide-head"
        case, lengths = tiny_model(name), (5, 17)
    table = TIED if args.shape == "qwen3-0.6b" else UNTIED
    with tempfile.TemporaryDirectory() as scratch:
        for label, changes in table.items():
            changed = replace(case, **{**PLAIN, **changes})
            for row in judged(args, changed, lengths, Path(scratch) / label.replace(" ", "-")):
                yield {"shape": args.shape, "construction": label, **row}


def judged(args, case, lengths, scratch):
    model = random_hf_model(case, 0, args.device)
    reference = Reference(random_batch(case.settings["vocab_size"], lengths, 16))
    reference.add_truth(model)
    backends = ("flash_attn", "triton") if args.device == "cuda" else ("torch",)
    for dtype in DTYPES:
        cast(model, dtype)
        reference.add_yardstick(model)
        folder = save_config(case, scratch / str(dtype)[6:], dtype)
        runs = [(backend, None) for backend in backends]
        for backend, defect in [*runs, *((backends[-1], name) for name in CANARIES)]:
            block_size = BLOCK_SIZES[backend]
            options = engine_options(
                folder,
                dtype,
                args.device,
                load_format="dummy",
                attention_backend=backend,
                block_size=block_size,
                enforce_eager=True,
                max_num_batched_tokens=512,
                max_model_len=max(lengths) + 300 if not args.tiny else 64,
                num_kvcache_blocks=8 * -(-(max(lengths) + 300) // block_size),
            )
            weights = dict(model.state_dict())
            plant = CANARIES[defect] if defect else None
            stats, _ = run_model(options, reference, dtype, args.device, weights, defect=plant)
            yield {"dtype": str(dtype)[6:], "backend": backend, "defect": defect, **numbers(stats)}


def numbers(stats):
    return {
        "c": max(stats.observed_c, stats.centred_c),
        "pooled_ratio": stats.pooled_ratio,
        "kl_mean": stats.kl_mean,
        "close_share": stats.close_share,
        "violations": list(stats.violations),
    }


def yardsticks(args):
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    sequences = real_sequences(args.smollm2, long_tokens=0 if args.tiny else 2048)
    model = load_hf(args.smollm2, torch.float32, args.device)
    truth = {item.name: hf_logits(model, item.tokens) for item in sequences}
    cast(model, dtype)
    default = {item.name: hf_logits(model, item.tokens) for item in sequences}
    for name, kind in ATTENTIONS.items():
        if kind is not None and args.device != "cuda":
            continue
        comparison = LogitComparison(dtype, rules_for(dtype, MAX_CLOSE_SHARE[dtype]))
        for item in sequences:
            logits = by(model, item.tokens, kind)
            for rows in torch.arange(len(logits), device=args.device).split(256):
                pair = truth[item.name][rows], default[item.name][rows]
                comparison.add(item.name, rows, logits[rows], *pair)
        yield {"dtype": str(dtype)[6:], "attention": name, **numbers(comparison.finish())}


def by(model, tokens, kind):
    """HF's logits by one kernel of SDPA, or by its own eager attention."""
    if kind is None:
        with attention_of(model, "eager"):
            return hf_logits(model, tokens)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, kind)):
        return hf_logits(model, tokens)


if __name__ == "__main__":
    main()
