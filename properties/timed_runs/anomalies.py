"""Measures how often common beliefs about tuning fail; writes docs/anomalies.md."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.arguments.source_tree import docs_folder
from properties.search.failures import commit
from properties.timed_runs.relations import BELIEFS, SKIP, TRUE_RELATIONS
from properties.timed_runs.timed import Case, random_case, simulate

POLICIES = ("mixed", "prefill_first")
RECORD = Path(__file__).resolve().parents[1] / "records" / "anomalies.json"
# From this heading on docs/anomalies.md is written by hand.
BY_HAND = "\n## Weaknesses that the policies keep by design\n"


@dataclass
class Measurement:
    """Counts over many cases of one policy; examples are (size, seed, before, after)."""

    cases: int = 0
    applicable: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    worse: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], tuple[int, int, float, float]] = field(default_factory=dict)

    def merge(self, other: Measurement) -> None:
        """Adds another part."""
        self.cases += other.cases
        self.applicable.update(other.applicable)
        self.broken.update(other.broken)
        self.worse.update(other.worse)
        for key, example in other.examples.items():
            self.examples[key] = min(example, self.examples.get(key, example))


def size_of(case: Case) -> int:
    """How much there is to read in a case."""
    return sum(1 + len(job.prompt) + job.outputs for job in case.jobs)


def measure(policy: str, first: int, count: int) -> Measurement:
    """Checks all relations and beliefs on consecutive seeds."""
    total = Measurement()
    for seed in range(first, first + count):
        case = random_case(seed, policy)
        total.cases += 1
        for relation in TRUE_RELATIONS:
            told = relation.check(case)
            total.applicable[relation.name] += told != SKIP
            total.broken[relation.name] += told is not None and told != SKIP
        for belief in BELIEFS:
            for metric, (before, after) in belief.violations(case).items():
                key = (belief.text, metric)
                total.worse[key] += 1
                example = (size_of(case), seed, before, after)
                total.examples[key] = min(example, total.examples.get(key, example))
    return total


def measure_all(policy: str, cases: int, jobs: int) -> Measurement:
    """`measure` spread over processes."""
    chunk = 50
    total = Measurement()
    firsts = range(0, cases, chunk)
    if jobs == 1:
        for first in firsts:
            total.merge(measure(policy, first, min(chunk, cases - first)))
        return total
    with get_context("spawn").Pool(jobs) as pool:
        for part in pool.imap_unordered(partial(measure, policy, count=chunk), firsts):
            total.merge(part)
    return total


HEAD = """# Beliefs about tuning that are false

Measured with `lockstep verify anomalies --write` ({cases} random cases per policy, commit
`{commit}`): 2 to 6 requests, blocks of 2 tokens, pools of 5 to 12 blocks, 1 to 6 seats, budgets of
4 to 16 tokens; a step costs overhead + tokens + batch size. A percentage is the share of cases in
which the change made that number *worse*. The rates depend on the sampler; that they are not zero
does not. These are list-scheduling anomalies: a larger pool admits earlier, so prefills interrupt
decodes and more sequences grow at once and preempt each other later.

So: never tune one of these knobs by the rule "more is never worse". Simulate.
"""


def document(results: dict[str, Measurement]) -> str:
    """The text of docs/anomalies.md."""
    cases = next(iter(results.values())).cases
    parts = [HEAD.format(cases=cases, commit=commit()[:12])]
    parts.append(f"| belief | metric | {' | '.join(results)} | smallest counter-example |")
    parts.append("| --- | --- | " + "--- | " * len(results) + "--- |")
    for belief in BELIEFS:
        for metric in belief.metrics:
            key = (belief.text, metric)
            rates = [f"{result.worse[key] / result.cases:.1%}" for result in results.values()]
            parts.append(
                f"| {belief.text} | {metric} | {' | '.join(rates)} | {_example(results, key)} |"
            )
    parts.append(_worked_example())
    parts.append("\n## Relations that hold\n\nNo case broke them.\n")
    parts.append(f"| relation | {' | '.join(results)} |\n| --- | " + "--- | " * len(results))
    for relation in TRUE_RELATIONS:
        counts = [
            f"{result.broken[relation.name]}/{result.applicable[relation.name]}"
            for result in results.values()
        ]
        parts.append(f"| {relation.text} | {' | '.join(counts)} |")
    return "\n".join(parts) + "\n"


def _example(results: dict[str, Measurement], key: tuple[str, str]) -> str:
    found = [
        (result.examples[key], policy)
        for policy, result in results.items()
        if key in result.examples
    ]
    if not found:
        return "none found"
    (_, seed, before, after), policy = min(found)
    case = random_case(seed, policy)
    jobs = ", ".join(f"{len(job.prompt)}+{job.outputs}@{job.arrival}" for job in case.jobs)
    return f"{policy} seed {seed} ({jobs}): {before:g} to {after:g}"


def _worked_example() -> str:
    return """
Requests are written prompt+outputs@arrival; a case is
`properties.timed_runs.timed.random_case(seed, policy)`.

## One example by hand

Block size 2, budget 8, 3 seats, no cache, policy `prefill_first`, a step costs 5 + tokens + batch
size. Two requests at time 0: prompt 4 with 2 outputs, and prompt 5 with 2 outputs. With **4**
blocks the second waits: steps end at 10, 17, 28, 35 and nobody is preempted. With **5** blocks the
second is admitted at 10 and then preempted, because the first needs a block: steps end at 10, 21,
28, 40.
One more block costs 5 time units. (`properties/tests/test_relations.py` keeps this example.)"""


def kept_part(page: str) -> str:
    """What is written by hand at the end of the page."""
    _, heading, rest = page.partition(BY_HAND)
    return heading + rest


def anomalies_main(argv: list[str]) -> int:
    """`lockstep verify anomalies`."""
    parser = VerbParser(
        "verify anomalies",
        "Measures how often beliefs about tuning fail, and that true relations hold.",
    )
    parser.option("cases", 2000)
    parser.option("jobs", 1)
    parser.option("write")
    args = parser.parse(argv)
    folder = docs_folder() if args.write else None
    results = {policy: measure_all(policy, args.cases, args.jobs) for policy in POLICIES}
    text = document(results)
    if folder is not None:
        page = folder / "anomalies.md"
        page.write_text(text + kept_part(page.read_text()))
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(_record(results), indent=1) + "\n")
    else:
        print(text, end="")
    return 1 if any(sum(result.broken.values()) for result in results.values()) else 0


def _record(results: dict[str, Measurement]) -> dict[str, object]:
    return {
        "command": "lockstep verify anomalies --write",
        "commit": commit(),
        "policies": {
            policy: {
                "cases": result.cases,
                "worse": {f"{text}: {metric}": n for (text, metric), n in result.worse.items()},
                "broken_relations": {name: n for name, n in result.broken.items() if n},
            }
            for policy, result in results.items()
        },
    }


__all__ = ["anomalies_main", "measure", "simulate"]
