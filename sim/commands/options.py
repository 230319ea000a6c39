"""The options of `lockstep sim run`, shared with the verbs that run many simulations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from engine.core import ConfigError
from engine.core.config import POLICY_NAMES
from sim.cluster.router import ROUTERS
from sim.cluster.simulation import ON_OVERSIZE, RunOptions
from sim.run.deployment import COST_HELP, Deployment
from sim.specs.hardware import HARDWARE
from sim.specs.models import MODELS
from sim.workloads import lengths
from sim.workloads.arrivals import PROCESSES, check_rate
from sim.workloads.generators import WORKLOADS, generate, preset
from sim.workloads.readers import TraceOptions, read_lengths, read_trace
from sim.workloads.servegen import ServeGenOptions, is_servegen, read_servegen
from sim.workloads.table import Workload


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that only mean "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of files and values are."""

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options of a run."""
    add_workload_options(parser)
    add_deployment_options(parser)
    run = parser.add_argument_group("run and output")
    run.add_argument("--seed", type=int, default=0, help="seed of everything that is drawn")
    run.add_argument(
        "--intervals",
        type=int,
        default=0,
        metavar="N",
        help="90 %% intervals from N runs with other seeds and resampled step errors",
    )
    run.add_argument(
        "--on-oversize",
        default="reject",
        metavar="|".join(ON_OVERSIZE),
        help="requests that can never fit: leave them out and count them, or stop",
    )
    run.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="requests that the client keeps in flight; others wait at the client",
    )
    run.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="SLOs such as ttft:500 tpot:50 e2el:20000; all must hold",
    )
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write summary.json, requests.csv, steps.jsonl, report.html, trace.json",
    )
    run.add_argument(
        "--perfetto",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write trace.json for https://ui.perfetto.dev",
    )
    run.add_argument("--json", action="store_true", help="print summary.json and not a table")
    run.add_argument(
        "--step-by-step",
        action="store_true",
        help="never skip over stretches of decode steps (same results, slower)",
    )


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what is sent."""
    group = parser.add_argument_group("workload")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace; its format is found by its columns"
    )
    source.add_argument("--workload", metavar="NAME", help=f"one of {', '.join(WORKLOADS)}")
    group.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help="take only the first N requests (synthetic: 1000)",
    )
    group.add_argument(
        "--rate", type=float, metavar="R", help="mean requests per second (sessions: new sessions)"
    )
    group.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="divide all arrival times of a trace by F",
    )
    group.add_argument(
        "--arrival",
        default="poisson",
        metavar="|".join(PROCESSES),
        help="arrival process of a trace without times",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="gamma shape of the gaps: 1 is Poisson, below is burstier",
    )
    group.add_argument("--prompt-len", metavar="SPEC", help=f"prompt lengths: {lengths.HELP}")
    group.add_argument("--output-len", metavar="SPEC", help="output lengths, likewise")
    _add_session_options(group)
    _add_trace_options(group)


def _add_session_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--clients", type=int, metavar="N", help="clients of a closed loop")
    group.add_argument(
        "--think-s",
        type=float,
        metavar="S",
        help="mean pause of a client or session between its requests",
    )
    group.add_argument("--turns", metavar="SPEC", help="turns of a session")
    group.add_argument(
        "--shared-prefix",
        type=int,
        metavar="N",
        help="tokens that open the prompt of every session",
    )


def _add_trace_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chars-per-token",
        type=int,
        default=4,
        metavar="N",
        help="for traces whose lengths are characters",
    )
    group.add_argument(
        "--hash-block-tokens",
        type=int,
        default=16,
        metavar="N",
        help="block size of the hash ids of a plain trace",
    )
    group.add_argument(
        "--window-start",
        type=int,
        default=0,
        metavar="S",
        help="first second of a ServeGen archive",
    )
    group.add_argument(
        "--window-length", type=int, default=600, metavar="S", help="seconds of a ServeGen archive"
    )


def add_deployment_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what serves."""
    default = Deployment()
    group = parser.add_argument_group("deployment")
    group.add_argument(
        "--model",
        default=default.model,
        metavar="M",
        help=f"config.json or one of {', '.join(MODELS)}",
    )
    group.add_argument(
        "--hardware", default=default.hardware, metavar="H", help=f"one of {', '.join(HARDWARE)}"
    )
    group.add_argument("--tp", type=int, default=default.tp, help="tensor parallel size")
    group.add_argument("--replicas", type=int, default=default.replicas, help="servers")
    group.add_argument(
        "--router", default=default.router, metavar="R", help=f"one of {', '.join(ROUTERS)}"
    )
    group.add_argument(
        "--policy", default=default.policy, metavar="|".join(POLICY_NAMES), help="scheduling policy"
    )
    _add_kernel_options(group, default)
    group.add_argument(
        "--expert-parallel",
        action="store_true",
        help="spread the experts of a mixture over the GPUs of all replicas (cost roofline)",
    )
    group.add_argument(
        "--async-scheduling",
        action="store_true",
        help="plan each step while the one before it runs, as vLLM does by default",
    )
    group.add_argument("--cost", default=default.cost, metavar="MODEL", help=COST_HELP)


def _add_kernel_options(group: argparse._ArgumentGroup, default: Deployment) -> None:
    group.add_argument("--block-size", type=int, default=default.block_size, help="KV block size")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=default.max_num_seqs,
        help="sequences that hold KV at a time",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        help="tokens in one step",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt and output tokens of a request (what model and pool allow)",
    )
    group.add_argument(
        "--num-kv-blocks",
        "--num-kvcache-blocks",
        type=int,
        metavar="N",
        help="size of the KV pool (what fits into memory)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="F",
        default=default.gpu_memory_utilization,
        help="share of the memory for weights, activations and KV",
    )
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=default.prefix_caching,
        help="reuse KV of equal prefixes",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        default=default.long_prefill_token_threshold,
        help="longest chunk of one prompt in a step, 0 for no limit",
    )


def deployment_of(arguments: argparse.Namespace) -> Deployment:
    """The deployment that the arguments describe."""
    return Deployment(
        model=arguments.model,
        hardware=arguments.hardware,
        tp=arguments.tp,
        replicas=arguments.replicas,
        router=arguments.router,
        policy=arguments.policy,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        num_kv_blocks=arguments.num_kv_blocks,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        prefix_caching=arguments.prefix_caching,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        expert_parallel=arguments.expert_parallel,
        async_scheduling=arguments.async_scheduling,
        cost=arguments.cost,
    )


def run_options_of(arguments: argparse.Namespace) -> RunOptions:
    """The run options that the arguments describe."""
    return RunOptions(arguments.on_oversize, arguments.max_concurrency, arguments.step_by_step)


def load_workload(arguments: argparse.Namespace) -> Workload:
    """Reads or draws the workload that the arguments describe."""
    if arguments.seed < 0:
        raise ConfigError("seed", arguments.seed, "must not be negative")
    check_rate("rate_scale", arguments.rate_scale)
    if arguments.rate is not None:
        check_rate("rate", arguments.rate)
    if arguments.workload is not None:
        workload = _synthetic(arguments)
    elif is_servegen(arguments.trace):
        _refuse(arguments, "trace", _SYNTHETIC_ONLY)
        workload = read_servegen(arguments.trace, _servegen_options(arguments))
    else:
        _refuse(arguments, "trace", _SYNTHETIC_ONLY)
        workload = read_trace(arguments.trace, _trace_options(arguments))
    if arguments.rate_scale != 1.0:
        workload.scale_arrivals(arguments.rate_scale)
    return workload


_SYNTHETIC_ONLY = ("prompt_len", "output_len", "clients", "think_s", "turns", "shared_prefix")


def _refuse(arguments: argparse.Namespace, other: str, options: tuple[str, ...]) -> None:
    """An option that would be ignored is an error."""
    for option in options:
        value = getattr(arguments, option)
        if value is not None:
            raise ConfigError(option, value, f"has no meaning with --{other}")


def _synthetic(arguments: argparse.Namespace) -> Workload:
    spec = preset(
        arguments.workload,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        prompt=arguments.prompt_len,
        output=arguments.output_len,
        num_requests=arguments.num_requests,
        clients=arguments.clients,
        think_s=arguments.think_s,
        turns=arguments.turns,
        shared_prefix=arguments.shared_prefix,
    )
    return generate(arguments.workload, spec, arguments.seed, read_lengths)


def _trace_options(arguments: argparse.Namespace) -> TraceOptions:
    return TraceOptions(
        num_requests=arguments.num_requests,
        rate=arguments.rate,
        arrival=arguments.arrival,
        burstiness=1.0 if arguments.burstiness is None else arguments.burstiness,
        seed=arguments.seed,
        chars_per_token=arguments.chars_per_token,
        hash_block_tokens=arguments.hash_block_tokens,
    )


def _servegen_options(arguments: argparse.Namespace) -> ServeGenOptions:
    return ServeGenOptions(
        start_s=arguments.window_start,
        duration_s=arguments.window_length,
        seed=arguments.seed,
        num_requests=arguments.num_requests,
        rate=arguments.rate,
    )
