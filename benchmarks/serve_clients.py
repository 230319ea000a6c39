"""Public load generators against a running `lockstep serve`, beside what its `/metrics` says.

    lockstep serve MODEL --served-model-name m --port 8123 [--body sim ...]
    python benchmarks/serve_clients.py --url http://127.0.0.1:8123 --name m --tokenizer MODEL \\
        --vllm .../bin/vllm --guidellm .../bin/guidellm --aiperf .../bin/aiperf \\
        --out benchmarks/records/serve_clients.json

Each client is installed in an environment of its own and sends the same shape of load: a fixed
number of streams at a time, prompts and outputs of fixed lengths. Its means of TTFT, of the time
between tokens and of the whole request are compared with those that the server counted meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

FIGURES = {
    "ttft_ms": "vllm:time_to_first_token_seconds",
    "itl_ms": "vllm:inter_token_latency_seconds",
    "e2e_ms": "vllm:e2e_request_latency_seconds",
}


def metrics(url):
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def counted(before, after):
    """What the server counted between two scrapes."""

    def grown(name):
        return after[name] - before[name]

    means = {
        figure: 1e3 * grown(f"{name}_sum") / grown(f"{name}_count")
        for figure, name in FIGURES.items()
    }
    return {
        "requests": grown("vllm:request_success_total"),
        "input_tokens": grown("vllm:prompt_tokens_total"),
        "output_tokens": grown("vllm:generation_tokens_total"),
        **means,
    }


def run(command):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def vllm_bench(args, folder):
    command = [
        args.vllm, "bench", "serve", "--backend", "openai", "--base-url", args.url,
        "--model", args.name, "--tokenizer", args.tokenizer, "--dataset-name", "random",
        "--random-input-len", args.input_len, "--random-output-len", args.output_len,
        "--num-prompts", args.requests, "--max-concurrency", args.streams, "--ignore-eos",
        "--num-warmups", 0, "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--save-result", "--result-filename", folder / "r.json",
    ]  # fmt: skip
    run([*map(str, command)])
    found = json.loads((folder / "r.json").read_text())
    return command, {
        "requests": found["completed"],
        "input_tokens": found["total_input_tokens"],
        "output_tokens": found["total_output_tokens"],
        "ttft_ms": found["mean_ttft_ms"],
        "itl_ms": found["mean_itl_ms"],
        "e2e_ms": found.get("mean_e2el_ms"),
    }


def guidellm(args, folder):
    data = f"kind=synthetic_text,prompt_tokens={args.input_len},output_tokens={args.output_len}"
    command = [
        args.guidellm, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={args.url},model={args.name}",
        "--profile", f"kind=concurrent,streams={args.streams}",
        "--constraint", f"kind=max_requests,count={args.requests}", "--data", data,
        "--tokenizer", f"kind=hf_auto,model={args.tokenizer}",
        "--output", f"kind=json,path={folder / 'r.json'}",
    ]  # fmt: skip
    run([*map(str, command)])
    found = json.loads((folder / "r.json").read_text())["benchmarks"][0]["metrics"]
    num_requests = found["request_totals"]["successful"]

    def mean(name):
        return found[name]["successful"]["mean"]

    return command, {
        "requests": num_requests,
        "input_tokens": mean("prompt_token_count") * num_requests,
        "output_tokens": mean("output_token_count") * num_requests,
        "ttft_ms": mean("time_to_first_token_ms"),
        "itl_ms": mean("inter_token_latency_ms"),
        "e2e_ms": mean("request_latency") * 1e3,
    }


def aiperf(args, folder):
    command = [
        args.aiperf, "profile", "-m", args.name, "--url", args.url,
        "--endpoint-type", "completions", "--streaming", "--tokenizer", args.tokenizer,
        "--use-server-token-count", "--concurrency", args.streams,
        "--request-count", args.requests, "--num-dataset-entries", args.requests,
        "--prompt-input-tokens-mean", args.input_len,
        "--prompt-output-tokens-mean", args.output_len, "--extra-inputs", "ignore_eos:true",
        "--output-artifact-dir", folder,
    ]  # fmt: skip
    run([*map(str, command)])
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return command, {
        "requests": found["request_count"]["avg"],
        "input_tokens": found["total_usage_prompt_tokens"]["avg"],
        "output_tokens": found["total_usage_completion_tokens"]["avg"],
        "ttft_ms": found["time_to_first_token"]["avg"],
        "itl_ms": found["inter_token_latency"]["avg"],
        "e2e_ms": found["request_latency"]["avg"],
    }


def compared(said, counts):
    """Relative differences of the client's figures from the server's, in per cent."""
    return {
        name: round(100 * (said[name] / counts[name] - 1), 3)
        for name in said
        if said[name] is not None and counts[name]
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("url", "name", "tokenizer"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("vllm", "guidellm", "aiperf"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--served", default="", help="the options of the server, for the record")
    parser.add_argument("--out", type=Path)
    for name, default in (("requests", 30), ("streams", 4), ("input-len", 200), ("output-len", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.url}/version") as answer:
        server = json.load(answer)
    found = {}
    for name, client in (("vllm", vllm_bench), ("guidellm", guidellm), ("aiperf", aiperf)):
        if getattr(args, name) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            before = metrics(args.url)
            command, said = client(args, Path(folder))
            counts = counted(before, metrics(args.url))
        found[name] = {
            "options": [str(word) for word in command[1:] if "/" not in str(word)],
            "client": said,
            "server": counts,
            "difference_percent": compared(said, counts),
        }
        print(name, json.dumps(found[name]["difference_percent"]), flush=True)
    record = {
        "what": "figures of public clients beside the server's own",
        "served": args.served, "server": server,
        "cores": os.cpu_count(), "python": platform.python_version(),
        "clients": found,
    }  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
