"""The options that only the simulator has, beside those that it shares with the engine."""

from __future__ import annotations

from pathlib import Path

from engine.arguments import table
from engine.arguments.option import Option, Table
from sim.cluster.router import ROUTERS
from sim.cluster.simulation import ON_OVERSIZE
from sim.workloads.arrivals import (
    LEAST_BURSTINESS,
    LEAST_RATE,
    MOST_BURSTINESS,
    MOST_RATE,
    PROCESSES,
)
from sim.workloads.generators import WORKLOADS

# Situations, as they stand in the messages about options that do not apply.
SYNTHETIC = "a synthetic workload"
OPEN_LOOP = "an open loop"
GAMMA = "arrivals of a gamma process"
CLOSED = "a closed loop"
SESSIONS = "sessions"
TIMED = "a trace with arrival times"
UNTIMED = "a trace without arrival times"
ARCHIVE = "a ServeGen archive"
RECORDED = "a recorded run"
IN_CHARACTERS = "a trace whose lengths are characters"
TEXTS = "a trace of texts"
HASHED = "a trace with hash ids"
WITH_OUT = "a run with --out"
WITH_REPLICATES = "a validation with --replicates"

# A workload is held in memory, so its size is bounded before it is drawn.
MOST_REQUESTS = 10_000_000

WORKLOAD = (
    Option(name="trace", kind=Path, metavar="FILE",
           help="trace, or a step log or recorded run; found by what is in it"),
    Option(name="workload", kind=str, metavar="NAME", choices=tuple(WORKLOADS),
           help=f"one of {', '.join(WORKLOADS)}"),
    Option(name="num_requests", kind=int, least=1, most=MOST_REQUESTS, may_be_none=True,
           help="take only the first N requests (synthetic: 1000)"),
    Option(name="rate", kind=float, least=LEAST_RATE, most=MOST_RATE, metavar="R",
           belongs_to=(OPEN_LOOP, SESSIONS, UNTIMED, ARCHIVE),
           help="mean requests per second (sessions: new sessions)"),
    Option(name="rate_scale", kind=float, least=1e-6, most=1e6, metavar="F",
           belongs_to=(TIMED, ARCHIVE, RECORDED),
           help="divide all arrival times of a trace by F"),
    Option(name="arrival", kind=str, choices=PROCESSES, aliases=("arrivals",),
           belongs_to=(UNTIMED,), help="arrival process of a trace without times"),
    Option(name="burstiness", kind=float, least=LEAST_BURSTINESS, most=MOST_BURSTINESS,
           metavar="B", belongs_to=(GAMMA,),
           help="gamma shape of the gaps: 1 is Poisson, below is burstier"),
    Option(name="prompt_len", kind=str, metavar="SPEC", belongs_to=(SYNTHETIC,),
           help="prompt lengths, as --output-len"),
    Option(name="clients", kind=int, least=1, most=MOST_REQUESTS, belongs_to=(CLOSED,),
           help="clients of a closed loop"),
    Option(name="think_s", kind=float, least=0, most=1e6, metavar="S",
           belongs_to=(CLOSED, SESSIONS),
           help="mean pause of a client or session between its requests"),
    Option(name="turns", kind=str, metavar="SPEC", belongs_to=(SESSIONS,),
           help="turns of a session, as --output-len"),
    Option(name="shared_prefix", kind=int, least=0, most=10_000_000, belongs_to=(SESSIONS,),
           help="tokens that open the prompt of every session"),
    Option(name="chars_per_token", kind=int, least=1, belongs_to=(IN_CHARACTERS, TEXTS),
           help="for traces whose lengths are characters (4) and for texts"),
    Option(name="hash_block_tokens", kind=int, least=1, belongs_to=(HASHED,),
           help="block size of the hash ids of a trace (found from its rows)"),
    Option(name="on_bad_row", kind=str, choices=("leave-out", "error"), belongs_to=(TIMED, UNTIMED),
           help="rows without tokens and failed requests: leave them out and count them, or stop"),
    Option(name="window_start", kind=int, least=0, metavar="S", belongs_to=(TIMED, ARCHIVE),
           aliases=("window_start_s",), help="first second of a trace or ServeGen archive (0)"),
    Option(name="window_length", kind=int, least=1, metavar="S", belongs_to=(TIMED, ARCHIVE),
           aliases=("window_length_s",),
           help="seconds of a trace (all) or of a ServeGen archive (600)"),
)  # fmt: skip

RUN = (
    Option(name="router", kind=str, choices=tuple(ROUTERS), metavar="R",
           help=f"one of {', '.join(ROUTERS)}"),
    Option(name="intervals", kind=int, least=0, most=10_000,
           help="90 % intervals from N runs with other seeds and resampled step errors"),
    Option(name="on_oversize", kind=str, choices=ON_OVERSIZE,
           help="requests that can never fit: leave them out and count them, or stop"),
    Option(name="max_concurrency", kind=int, least=1, may_be_none=True,
           help="requests that the client keeps in flight; others wait at the client"),
    Option(name="goodput", kind=str, several=True, metavar="METRIC:MS",
           help="SLOs such as ttft:500 tpot:50 e2el:20000; all must hold"),
    Option(name="perfetto", kind=bool, belongs_to=(WITH_OUT,),
           help="write trace.json for https://ui.perfetto.dev"),
    Option(name="step_by_step", kind=bool, switch=True,
           help="never skip over stretches of decode steps (same results, slower)"),
    Option(name="until", kind=float, above=0, metavar="S",
           help="fit only to requests that had finished S seconds after the first was queued"),
)  # fmt: skip

# Prefill and decode on servers of their own.
SPLIT = (
    Option(name="prefill_replicas", kind=int, least=0, most=4096,
           help="servers that compute prompts and nothing else"),
    Option(name="decode_replicas", kind=int, least=0, most=4096,
           help="servers that take over behind the first token"),
    Option(name="kv_transfer_gb_per_s", kind=float, above=0, most=1e6, metavar="GB/S",
           help="bandwidth of the KV out of each GPU of a prefill server"),
    Option(name="kv_transfer_latency_us", kind=float, least=0, most=1e9, metavar="US",
           help="latency of a transfer of KV"),
    Option(name="kv_transfer_layerwise", kind=bool,
           help="send the KV of a layer while the next ones are computed"),
)  # fmt: skip

# Host memory behind the pool of every replica.
HOST_TIER = (
    Option(name="host_tier_gb", kind=float, least=0, most=1e6, metavar="GB",
           help="host memory of each replica that keeps what its KV pool evicts"),
    Option(name="host_tier_gb_per_s", kind=float, above=0, most=1e6, metavar="GB/S",
           help="bandwidth between each GPU and the host tier, both directions together"),
    Option(name="host_tier_overlap", kind=bool,
           help="copy to and from the host tier while the step computes"),
)  # fmt: skip

OTHER_VERBS = (
    Option(name="vary", kind=str, repeated=True, metavar="OPTION=VALUES",
           help="values, as 1,2,4 or LOW:HIGH:COUNT; more than once for a grid"),
    Option(name="seeds", kind=int, least=1, most=1000,
           help="runs of each point, with as many seeds from --seed on"),
    Option(name="init", kind=bool, switch=True, help="write a commented example study"),
    Option(name="cache", kind=Path, metavar="DIR", help="where runs are kept"),
    Option(name="ray", kind=str, metavar="ADDRESS",
           help="run on a Ray cluster; local starts one here"),
    Option(name="profile", kind=Path, metavar="FILE", help="profile of a calibrated cost model"),
    Option(name="held_out", kind=bool, switch=True,
           help="predict each log with a fit to the other ones"),
    Option(name="replicates", kind=int, least=0, most=10_000,
           help="simulations with resampled step errors"),
    Option(name="engine", kind=str, may_be_none=True, help="the engine, with its version"),
    Option(name="graphs", kind=str, help="captured graphs: auto, vllm, none, or sizes as 1,2,4"),
    Option(name="top", kind=int, least=0, help="extremes to show"),
    Option(name="margin_ms", kind=float, least=0, metavar="MS", help="smaller changes are none"),
)  # fmt: skip

# `lockstep serve --body sim`.
ANSWERS = ("random", "echo")
TWIN = (
    Option(name="speed", kind=float, least=1e-3, most=1e6, metavar="F",
           help="simulated time over wall time"),
    Option(name="startup_duration_s", kind=float, least=0, most=86_400, metavar="S",
           help="wall time for which /health/ready is not"),
    Option(name="mode", kind=str, choices=ANSWERS,
           help="answers of made-up words, or the prompt itself"),
    Option(name="output_tokens_mean", kind=float, least=1, most=1e9, metavar="N",
           help="mean length of answers where the client sets no limit"),
    Option(name="output_tokens_cv", kind=float, least=0, most=100, metavar="C",
           help="their coefficient of variation"),
    Option(name="fail_at", kind=str, repeated=True, metavar="[REPLICA@]S",
           help="a replica fails after S simulated seconds; may be repeated"),
    Option(name="slow", kind=str, repeated=True, metavar="REPLICA:FACTOR",
           help="the steps of a replica take longer; may be repeated"),
    Option(name="error_rate", kind=float, least=0, most=1, metavar="P",
           help="share of requests that end with an error"),
)  # fmt: skip

# `lockstep bench serve`.
CLIENT = (
    Option(name="base_url", kind=str, metavar="URL", help="the server, without /v1"),
    Option(name="client_api_key", kind=str, may_be_none=True, metavar="KEY",
           help="key that the server asks for"),
    Option(name="endpoint", kind=str, choices=("completions", "chat"),
           help="token ids go to completions, words to chat"),
    Option(name="vocab_size", kind=int, least=64, most=10_000_000,
           help="token ids of prompts are below"),
    Option(name="extra_body", kind=str, may_be_none=True, metavar="JSON",
           help="fields that every request has besides, as an object"),
    Option(name="read_timeout_s", kind=float, above=0, most=1e6, metavar="S",
           help="longest silence of the server within an answer"),
    Option(name="result", kind=Path, may_be_none=True, metavar="FILE",
           help="write the result in the keys of vllm bench serve --save-detailed"),
)  # fmt: skip

SIM_TABLE = Table(
    (*table.TABLE.options(), *WORKLOAD, *RUN, *SPLIT, *HOST_TIER, *OTHER_VERBS, *TWIN, *CLIENT)
)


def workload_situations(name: str, kind: str) -> list[str]:
    """What a synthetic workload of a kind is, for `Option.belongs_to`; `name` opens messages."""
    found = {"closed": [CLOSED], "sessions": [SESSIONS]}.get(kind, [OPEN_LOOP])
    found += [GAMMA] if kind == "gamma" else []
    return [f"workload {name}", SYNTHETIC, *found]
