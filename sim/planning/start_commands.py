"""Command lines that start a configuration: our engine's options and those of `vllm serve`."""

from __future__ import annotations

from pathlib import Path

from sim.planning.space import Candidate, Group
from sim.run.deployment import Deployment
from sim.specs.models import model_named

_HUB = {"qwen3": "Qwen/Qwen3-{}B", "qwen2.5": "Qwen/Qwen2.5-{}B-Instruct"}
_LLAMA = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}


def commands_of(candidate: Candidate) -> list[dict[str, object]]:
    """One entry per kind of server: how many, its role, and its command lines."""
    found = []
    for group in candidate.groups:
        entry: dict[str, object] = {
            "servers": group.deployment.replicas,
            "role": group.role,
            "hardware": group.deployment.hardware,
            "lockstep": lockstep_command(group.deployment),
        }
        entry["vllm"] = vllm_command(group)
        found.append(entry)
    return found


def hub_name(model: str) -> str:
    """The model's name on the Hugging Face hub, or the path that it was given by."""
    name = model_named(model).name
    if Path(model).exists():
        return str(Path(model).name)
    family, _, size = name.rpartition("-")
    if family in _HUB:
        return _HUB[family].format(size.removesuffix("b"))
    return _LLAMA.get(name, name)


def lockstep_command(deployment: Deployment) -> str:
    """The benchmark of our engine with the same options; it takes a model folder."""
    folder = hub_name(deployment.model).rsplit("/", 1)[-1]
    flags = ["lockstep bench throughput", f"--model {folder}"]
    if deployment.tp > 1:
        flags.append(f"--tensor-parallel-size {deployment.tp}")
    flags += [
        f"--policy {deployment.policy}",
        f"--max-num-seqs {deployment.max_num_seqs}",
        f"--max-num-batched-tokens {deployment.max_num_batched_tokens}",
        *_common_flags(deployment),
    ]
    if deployment.num_kv_blocks is not None:
        flags.append(f"--num-kvcache-blocks {deployment.num_kv_blocks}")
    return " ".join(flags)


def vllm_command(group: Group) -> str | None:
    """The same for `vllm serve`, or None for a policy that it does not have."""
    deployment = group.deployment
    if deployment.policy != "mixed":
        return None
    flags = ["vllm serve", hub_name(deployment.model)]
    if deployment.tp > 1:
        flags.append(f"--tensor-parallel-size {deployment.tp}")
    flags += [
        f"--max-num-seqs {deployment.max_num_seqs}",
        f"--max-num-batched-tokens {deployment.max_num_batched_tokens}",
        *_common_flags(deployment),
    ]
    if deployment.num_kv_blocks is not None:
        flags.append(f"--num-gpu-blocks-override {deployment.num_kv_blocks}")
    if group.role != "mixed":
        role = "kv_producer" if group.role == "prefill" else "kv_consumer"
        config = f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}'
        flags.append(f"--kv-transfer-config '{config}'")
    return " ".join(flags)


def _common_flags(deployment: Deployment) -> list[str]:
    flags = [
        f"--block-size {deployment.block_size}",
        f"--gpu-memory-utilization {deployment.gpu_memory_utilization:g}",
    ]
    if deployment.max_model_len is not None:
        flags.append(f"--max-model-len {deployment.max_model_len}")
    if deployment.long_prefill_token_threshold:
        flags.append(f"--long-prefill-token-threshold {deployment.long_prefill_token_threshold}")
    caching = deployment.prefix_caching
    flags.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
    return flags
