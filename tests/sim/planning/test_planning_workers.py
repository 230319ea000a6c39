"""Workers that are killed, on this machine and on a Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from engine.cli import main
from sim.planning.executors import ProcessExecutor, RayExecutor
from sim.planning.parse import read_study
from sim.planning.sampling import Source, load_source
from sim.planning.space import all_choices, candidate_of
from sim.planning.trial import Trial, Worker

STUDY = """
workload: {generator: poisson, prompt: 64, output: 16}
slo: {ttft_ms: {p90: 100}}
space: {cost: "constant:5", max_num_seqs: [4, 8], hardware: h200, model: qwen3-0.6b}
search: {requests: 200, seeds: 2, max_seeds: 2, keep: 1, tolerance: 0.05, verify_seeds: 0}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY, encoding="utf-8")
    return path


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one CPU each on this machine; workers find the checkout on their path."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def trials_of(path: Path):
    study = read_study(path)
    candidate = candidate_of(study, next(all_choices(study)))
    trials = [
        Trial(candidate, rate, seed, 200, study.slo, study.link, 0.1, 0.1)
        for rate in (20.0, 40.0)
        for seed in (0, 1)
    ]
    return load_source(study.workload), trials


def plan(path: Path, out: Path, *options: str) -> bytes:
    assert main(["sim", "plan", str(path), "--out", str(out), "--quiet", *options]) == 0
    return (out / "plan.json").read_bytes()


def test_the_run_of_a_killed_process_is_run_again(study):
    source, trials = trials_of(study)
    with ProcessExecutor(partial(Worker, source), 1) as executor:
        executor.submit("a", trials[0])
        ((_, (process, _, _)),) = executor._busy.items()
        process.kill()
        assert executor.next_result() == ("a", Worker(source).run(trials[0]))
        executor.submit("b", trials[1])
        assert executor.next_result()[1].error is None


def test_a_run_that_no_process_survives_fails_alone(study, monkeypatch):
    source, trials = trials_of(study)
    submit = ProcessExecutor.submit

    def deadly(self, key, trial):
        submit(self, key, trial)
        if key == "a":
            for process, name, _ in self._busy.values():
                if name == key:
                    process.kill()

    monkeypatch.setattr(ProcessExecutor, "submit", deadly)
    with ProcessExecutor(partial(Worker, source), 1) as executor:
        executor.submit("a", trials[0])
        key, result = executor.next_result()
        assert key == "a"
        assert result.error == "3 worker processes (exit code -9) died of it"
        executor.submit("b", trials[1])
        assert executor.next_result() == ("b", Worker(source).run(trials[1]))


def test_two_ray_nodes_give_the_bytes_of_one_process(study, tmp_path, cluster):
    whole = plan(study, tmp_path / "one")
    assert plan(study, tmp_path / "two", "--ray", cluster.address) == whole


def deadly(source: Source, deaths: Path, most: int) -> Source:
    """The same source, but the first `most` workers that draw seed 0 from it are killed."""

    class Deadly(Source):
        def draw(self, rate, num_requests, seed):
            if seed == 0 and len(list(deaths.iterdir())) < most:
                (deaths / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().draw(rate, num_requests, seed)

    return Deadly(source.spec, source.base, source.digest)


@pytest.mark.parametrize("most", [2, 3])
def test_the_run_of_a_killed_ray_worker_is_run_again(study, tmp_path, cluster, most):
    """Two deaths are survived; a run that kills three workers fails, and the others go on."""
    source, trials = trials_of(study)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    with RayExecutor(partial(Worker, deadly(source, deaths, most)), cluster.address) as executor:
        executor.submit("a", trials[0])
        executor.submit("b", trials[1])
        results = dict(executor.next_result() for _ in range(2))
    assert len(list(deaths.iterdir())) == most
    assert results["b"] == Worker(source).run(trials[1])
    if most == 2:
        assert results["a"] == Worker(source).run(trials[0])
    else:
        assert results["a"].error == "3 Ray workers (WorkerCrashedError) died of it"


def test_one_machine_can_be_its_own_ray_cluster(study, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    whole = plan(study, tmp_path / "one")
    assert plan(study, tmp_path / "ray", "--ray", "local", "--jobs", "2") == whole
