"""How much faster a study is with N workers, in processor time, which other load leaves alone.

Carries out a study once, one run after the other, on N virtual workers whose clocks advance by the
processor time of each run. Prints the sum of all runs, when the last worker would have ended, and
their ratio. The time of the planner itself is counted as if nothing ran beside it.

    python benchmarks/plan_scaling.py docs/studies/azure_h200.yaml --workers 2 --requests 200
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from sim.planning.cache import ResultCache
from sim.planning.interleave import Driver
from sim.planning.parse import read_study
from sim.planning.planner import Planner
from sim.planning.sampling import Source, load_source
from sim.planning.trial import Trial, TrialResult, Worker


class VirtualWorkers:
    """An executor whose workers run side by side in virtual time only."""

    def __init__(self, source: Source, count: int) -> None:
        self._worker, self._count = Worker(source), count
        self.now_s = self.busy_s = 0.0
        self.num_runs = 0
        self._running: list[tuple[float, int, str, TrialResult]] = []
        self._planner_since_s = time.process_time()

    def has_room(self) -> bool:
        return len(self._running) < self._count

    def submit(self, key: str, trial: Trial) -> None:
        self._count_planner()
        begin_s = time.process_time()
        result = self._worker.run(trial)
        self._planner_since_s = time.process_time()
        seconds = self._planner_since_s - begin_s
        self.busy_s += seconds
        self.num_runs += 1
        heapq.heappush(self._running, (self.now_s + seconds, self.num_runs, key, result))

    def next_result(self) -> tuple[str, TrialResult]:
        self._count_planner()
        end_s, _, key, result = heapq.heappop(self._running)
        self.now_s = max(self.now_s, end_s)
        return key, result

    def _count_planner(self) -> None:
        now_s = time.process_time()
        self.now_s += now_s - self._planner_since_s
        self.busy_s += now_s - self._planner_since_s
        self._planner_since_s = now_s

    def __enter__(self) -> VirtualWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, help="in place of the study's search.requests")
    arguments = parser.parse_args()
    study = read_study(arguments.study)
    if arguments.requests:
        search = replace(study.search, requests=arguments.requests)
        study = replace(study, search=search)
    source = load_source(study.workload)
    workers = VirtualWorkers(source, arguments.workers)
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(workers, ResultCache(Path(folder), source))
        Planner(study, source, driver, lambda text: None).plan()
    figures = {
        "study": study.name,
        "requests": study.search.requests,
        "runs": workers.num_runs,
        "workers": arguments.workers,
        "one_worker_cpu_s": round(workers.busy_s, 2),
        "makespan_cpu_s": round(workers.now_s, 2),
        "speedup": round(workers.busy_s / workers.now_s, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
