"""Every option that more than one verb, the engine or a study has: the one place to change it.

The options of the simulator's workloads, which need its registries, are in `sim.run.option_table`.
"""

from __future__ import annotations

from pathlib import Path

from engine.arguments.option import Option, Table
from engine.core.config import LIMITS, policy_options
from engine.core.policy_registry import POLICIES

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flash_attn")
QUANTIZATIONS = ("fp8",)
KV_CACHE_DTYPES = (
    *("auto", "bfloat16", "float16", "float32"),
    *("fp8", "fp8_e4m3", "fp8_e5m2"),
)
LOAD_FORMATS = ("safetensors", "dummy")
LARGEST_SEED = 2**63 - 1

# Situations, as they stand in the messages about options that do not apply.
DRAWS = "a temperature above 0"


def _policies_with(option: str) -> tuple[str, ...]:
    """The situations in which an option of the kernel means something."""
    return tuple(f"policy {name}" for name in policy_options()[option][1])


def _kernel(name: str, limits: str, help: str, **rest: object) -> Option:
    """An option whose limits are those of the kernel's option `limits`."""
    least, most = LIMITS[limits]
    return Option(name=name, kind=int, help=help, least=least, most=most, **rest)  # type: ignore[arg-type]


# What serves: the same names for LLM(**options), `generate`, `bench`, `sim run` and studies.
DEPLOYMENT = (
    Option(name="model", kind=str, help="model folder or hub id, NAME[@REVISION]", metavar="MODEL"),
    Option(name="tokenizer", kind=str, help="tokenizer folder", may_be_none=True),
    Option(
        name="tensor_parallel_size", kind=int, least=1, most=64, aliases=("tp",), short=("-tp",),
        help="GPUs over which one replica spreads the model",
    ),
    Option(
        name="replicas", kind=int, least=1, most=4096, aliases=("data_parallel_size",),
        short=("-dp",), help="servers with the whole model each",
    ),
    Option(
        name="policy", kind=str, choices=tuple(POLICIES), aliases=("scheduling_policy",),
        help="scheduling policy",
    ),
    _kernel("block_size", "block_size", "tokens in a KV block"),
    _kernel("max_num_seqs", "max_num_seqs", "sequences that hold KV at a time"),
    _kernel(
        "max_num_batched_tokens", "max_num_batched_tokens", "tokens in one step", sized=True
    ),
    _kernel(
        "max_model_len", "max_model_len", "prompt and output tokens of a request"
        " (unless given, what model and pool allow)", may_be_none=True, sized=True,
    ),
    _kernel(
        "num_kvcache_blocks", "num_blocks", "size of the KV pool in blocks"
        " (unless given, what fits into memory)", may_be_none=True,
        aliases=("num_kv_blocks", "num_gpu_blocks_override"),
    ),
    Option(
        name="kv_cache_memory_bytes", kind=int, least=1, may_be_none=True, sized=True,
        help="memory of the KV pool on each GPU, in place of what is measured to be free",
    ),
    Option(
        name="gpu_memory_utilization", kind=float, above=0, most=1,
        help="share of the memory for weights, activations and KV",
    ),
    Option(
        name="enable_prefix_caching", kind=bool, aliases=("prefix_caching",),
        help="reuse the KV of equal prefixes",
    ),
    _kernel(
        "long_prefill_token_threshold", "long_prefill_token_threshold",
        "longest chunk of one prompt in a step, 0 for no limit",
        belongs_to=_policies_with("long_prefill_token_threshold"),
    ),
    _kernel(
        "watermark_blocks", "watermark_blocks",
        "blocks that admission leaves free while something runs",
        belongs_to=_policies_with("watermark_blocks"),
    ),
    Option(
        name="async_scheduling", kind=bool,
        help="plan each step while the one before it runs, as vLLM does by default",
    ),
    Option(
        name="expert_parallel", kind=bool, aliases=("enable_expert_parallel",), short=("-ep",),
        help="spread the experts of a mixture over the GPUs and not each of them",
    ),
    Option(name="hardware", kind=str, help="GPU", metavar="GPU"),
    Option(name="cost", kind=str, help="cost model", metavar="MODEL"),
    Option(name="seed", kind=int, least=0, most=LARGEST_SEED, help="seed of all that is drawn"),
)  # fmt: skip

# What only the engine has.
ENGINE = (
    Option(name="device", kind=str, choices=DEVICES, help="where the model runs"),
    Option(name="dtype", kind=str, choices=DTYPES, help="dtype of weights, activations and KV"),
    Option(
        name="quantization", kind=str, choices=QUANTIZATIONS, may_be_none=True,
        help="quantise the checkpoint's 16-bit matrices while loading",
    ),
    Option(
        name="kv_cache_dtype", kind=str, choices=KV_CACHE_DTYPES, metavar="D",
        help="dtype of the KV cache: auto is what the model asks for, else its dtype",
    ),
    Option(
        name="load_format", kind=str, choices=LOAD_FORMATS,
        help="the checkpoint's weights, or random ones",
    ),
    Option(
        name="attention_backend", kind=str, choices=ATTENTION_BACKENDS, help="attention kernels"
    ),
    Option(name="enforce_eager", kind=bool, help="never capture CUDA graphs"),
    Option(name="step_log", kind=str, may_be_none=True, metavar="FILE", help="step log to write"),
    Option(name="debug", kind=bool, help="audit the kernel's state after each step"),
    Option(
        name="worker_timeout_s", kind=float, above=0, metavar="S",
        help="seconds without an answer after which a worker counts as dead",
    ),
)  # fmt: skip

SAMPLING = (
    Option(name="temperature", kind=float, least=0, help="0 takes the most likely token"),
    Option(
        name="top_k", kind=int, least=-1, belongs_to=(DRAWS,),
        help="most likely tokens to keep; 0 and -1 keep all",
    ),
    Option(
        name="top_p", kind=float, above=0, most=1, belongs_to=(DRAWS,),
        help="share of the probability to keep",
    ),
    Option(
        name="min_p", kind=float, least=0, most=1, belongs_to=(DRAWS,),
        help="least probability to keep, relative to the largest",
    ),
    Option(name="max_tokens", kind=int, least=1, help="output tokens of a request"),
    Option(name="stop", kind=str, repeated=True, help="text that ends an output; may be repeated"),
    Option(name="ignore_eos", kind=bool, switch=True, help="go on after the end-of-text token"),
    Option(
        name="request_seed", kind=int, least=-(2**63), most=LARGEST_SEED, may_be_none=True,
        belongs_to=(DRAWS,), help="seed of each request",
    ),
)  # fmt: skip

# What verbs read, write and show.
VERBS = (
    Option(name="prompt", kind=str, repeated=True, help="text to continue; may be repeated"),
    Option(name="chat", kind=bool, switch=True, help="send each prompt as a chat message"),
    Option(name="stream", kind=bool, switch=True, help="print the text as it comes"),
    Option(name="json", kind=bool, switch=True, help="print JSON and no text for people"),
    Option(name="quiet", kind=bool, switch=True, help="show no progress"),
    Option(name="out", kind=Path, metavar="PATH", help="where to write the result"),
    Option(name="report", kind=Path, metavar="FILE", help="where to write a page for people"),
    Option(name="jobs", kind=int, least=1, most=1024, help="processes"),
    Option(name="commit", kind=str, help="the commit to record, where there is no git"),
    Option(name="like", kind=str, metavar="SHAPE", help="a known shape, with random weights"),
    Option(name="std", kind=float, above=0, help="deviation of the matrices' weights"),
    Option(name="set", kind=str, repeated=True, metavar="KEY=VALUE",
           help="replace one key of the config by a JSON value; may be repeated"),
    # bench
    Option(name="batch_size", kind=int, least=1, help="requests at a time"),
    Option(name="input_len", kind=int, least=1, help="tokens of each prompt"),
    Option(name="output_len", kind=str, metavar="SPEC",
           help="output tokens of a request; the simulator also draws them"),
    Option(name="warm_up_iterations", kind=int, least=0, aliases=("num_iters_warmup",),
           help="batches before the measurement"),
    Option(name="iterations", kind=int, least=1, aliases=("num_iters",), help="measured batches"),
    Option(name="passes", kind=int, least=1, help="passes; the best after the first counts"),
    Option(name="num_seqs", kind=int, least=1, most=1_000_000, aliases=("num_prompts",),
           help="requests of a pass"),
    Option(name="min_len", kind=int, least=1, help="shortest prompt and output"),
    Option(name="max_len", kind=int, least=1, help="longest prompt and output"),
    Option(name="workload_seed", kind=int, least=0, most=LARGEST_SEED,
           help="seed of prompts and lengths"),
    # logs
    Option(name="times", kind=bool, switch=True, help="compare times too"),
    Option(name="every_step", kind=bool, switch=True, help="one slice per step"),
    # suites
    Option(name="seconds", kind=float, above=0, metavar="S", help="stop after this time"),
    Option(name="workloads", kind=int, least=1, help="stop after this many workloads"),
    Option(name="target", kind=str, metavar="MODULE:FACTORY", help="scheduler to check"),
    Option(name="every", kind=int, least=1, help="only each N-th workload"),
    Option(name="cases", kind=int, least=1, help="cases for each policy"),
    Option(name="by_picture", kind=bool, switch=True,
           help="take states that the follower cannot tell apart for one"),
    Option(name="write", kind=bool, switch=True,
           help="write the document into docs/ of the source tree"),
    Option(name="smollm2", kind=Path, metavar="FOLDER",
           help="SmolLM2 as a Hugging Face folder (else unpacked)"),
    Option(name="tiny", kind=bool, switch=True, help="small shapes: a test of the run itself"),
    Option(name="quick", kind=bool, switch=True, help="bfloat16 only, and no 8B shape"),
    Option(name="shape", kind=str, repeated=True, choices=("qwen3-0.6b", "qwen3-8b"),
           help="only this large shape, and nothing else; may be given twice"),
    # golden check, record and endpoint
    Option(name="prompts", kind=Path, metavar="FILE", help="prompts to compare with"),
    Option(name="reference", kind=Path, metavar="FILE", help="what golden record has written"),
    Option(name="html", kind=Path, metavar="FILE", help="where to write a page for people"),
    Option(name="url", kind=str, help="a server with OpenAI's endpoints, http://HOST:PORT"),
    Option(name="top_tokens", kind=int, least=2, most=200, help="most likely tokens that are kept"),
    Option(name="concurrency", kind=int, least=1, most=1024, several=True,
           help="requests at a time, one level after the other"),
    Option(name="repeats", kind=int, least=1, most=100, help="times that each level is run"),
    Option(name="timeout_s", kind=float, above=0, metavar="S", help="longest wait for an answer"),
    Option(name="served_model", kind=str, help="the model's name on the server"),
)  # fmt: skip

# The HTTP server, over either body.
BLOCK_HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SERVER = (
    Option(name="body", kind=str, choices=("engine", "sim"), help="what computes the tokens"),
    Option(name="host", kind=str, help="address to listen on"),
    Option(name="port", kind=int, least=0, most=65535, help="port to listen on; 0 for a free one"),
    Option(name="api_key", kind=str, repeated=True, metavar="KEY",
           help="key that clients must send; may be repeated"),
    Option(name="served_model_name", kind=str, repeated=True, metavar="NAME",
           help="name of the model for clients; may be repeated"),
    Option(name="max_queue", kind=int, least=0,
           help="requests beyond those that can run at a time; more are answered 503"),
    Option(name="max_body_bytes", kind=int, least=1, sized=True, help="longest request body"),
    Option(name="max_connections", kind=int, least=1, help="connections at a time"),
    Option(name="client_timeout_s", kind=float, above=0, metavar="S",
           help="longest time for sending a request, or for reading a part of an answer"),
    Option(name="drain_timeout_s", kind=float, least=0, metavar="S",
           help="time that accepted requests have after SIGTERM"),
    Option(name="log_requests", kind=bool, switch=True,
           help="log the id, sizes and times of every request; prompts and outputs never"),
    Option(name="kv_events_config", kind=str, may_be_none=True, metavar="JSON",
           help="publish the prefix cache's events over ZeroMQ, with the keys of vLLM's option"),
    Option(name="prefix_caching_hash_algo", kind=str, choices=BLOCK_HASHES,
           help="hashes of the blocks in these events"),
)  # fmt: skip

TABLE = Table((*DEPLOYMENT, *ENGINE, *SAMPLING, *VERBS, *SERVER))


def policy_situation(policy: str) -> str:
    """The situation that a scheduling policy is, for `Option.belongs_to`."""
    return f"policy {policy}"
