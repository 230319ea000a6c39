"""A recording scheduler writes a log that replays, stops costing nothing, and survives a kill."""

import json
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
from vllm_stand_in import StandInRequest, StandInScheduler, serve, vllm_config

from engine.cli import main as lockstep
from engine.core import ConfigError, InputError
from engine.steplog import vllm_recorder
from engine.steplog.replay import replay
from engine.steplog.vllm_recorder import RecordingScheduler, check_version
from engine.steplog.vllm_recording import open_log

STOP = 7


@pytest.fixture
def vllm(monkeypatch):
    """Modules under vLLM's names, with the stand-in as both schedulers."""
    plain = type("Scheduler", (StandInScheduler,), {})
    ahead = type("AsyncScheduler", (plain,), {})
    for name, found in (("scheduler", plain), ("async_scheduler", ahead)):
        module = ModuleType(f"vllm.v1.core.sched.{name}")
        setattr(module, found.__name__, found)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(vllm_recorder, "_installed_version", lambda: "0.33.0")


def requests_of(seed, stops=True):
    """Random requests, some of which share prefixes or go on where an earlier one ended."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, 900) for _ in range(24)]
    rows, count = [], 0
    for _ in range(30):
        row = []
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            own = [rng.randrange(100, 900) for _ in range(rng.randint(1, 12))]
            prompt = shared[: rng.choice((0, 8, 13, 24))] + own
            stop = STOP if stops and rng.random() < 0.5 else None
            priority = rng.choice((0, 0, 1, 2))
            row.append(StandInRequest(f"r{count}-x", prompt, rng.randint(1, 30), 4, stop, priority))
            count += 1
        rows.append(row)
    return rows


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [300, 20])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_recorded_run_replays_without_a_difference(
    vllm, tmp_path, monkeypatch, seed, is_async, num_blocks, policy
):
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("LOCKSTEP_RECORD", str(path))
    scheduler = RecordingScheduler(vllm_config=vllm_config(is_async, num_blocks, policy))
    assert type(scheduler).__name__ == f"Recording{'Async' if is_async else ''}Scheduler"
    rng, rows = random.Random(seed), requests_of(seed)
    serve(scheduler, rows, is_async=is_async, token_of=lambda name: rng.choice((STOP, *range(40))))
    scheduler.shutdown()
    assert scheduler.closed
    log = open_log(path)
    result = replay(log)
    assert result.difference is None
    assert result.num_requests == sum(map(len, rows)) and result.num_live == 0
    steps = log.recording.steps
    assert any(step.preempted for step in steps) == (num_blocks == 20)
    assert any(hits for step in steps for _, hits in step.admitted)


def recorded(vllm, tmp_path, monkeypatch, is_async=True):
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("LOCKSTEP_RECORD", str(path))
    scheduler = RecordingScheduler(vllm_config(is_async))
    serve(scheduler, requests_of(1, stops=False), is_async=is_async, token_of=lambda name: 3)
    scheduler.shutdown()
    return path


def test_a_log_cut_anywhere_reads_up_to_the_last_booked_step(vllm, tmp_path, monkeypatch):
    data = recorded(vllm, tmp_path, monkeypatch).read_bytes()
    cut = tmp_path / "cut.jsonl"
    rng = random.Random(0)
    for _ in range(12):
        cut.write_bytes(data[: rng.randrange(len(data) // 2, len(data))])
        result = replay(open_log(cut))
        assert result.difference is None
        assert result.num_steps > 20


def test_a_log_changed_in_one_decision_is_a_difference(vllm, tmp_path, monkeypatch, capsys):
    path = recorded(vllm, tmp_path, monkeypatch)
    lines = path.read_text().splitlines()
    at = [n for n, line in enumerate(lines) if line.startswith('["d"')][3]
    row = json.loads(lines[at])
    row[-1] -= 1
    lines[at] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")
    assert lockstep(["sim", "replay", str(path)]) == 1
    assert "num_free_blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('["z",1]', "Invalid value 'z'"),
        ('["s",1]', "not a line of a vLLM log"),
        ("{}", "not a line of a vLLM log"),
        ('["e",', "not JSON"),
    ],
)
def test_a_damaged_line_is_named(vllm, tmp_path, monkeypatch, line, complaint):
    path = recorded(vllm, tmp_path, monkeypatch)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], line, *lines[5:]]))
    with pytest.raises(InputError, match=f":6: .*{complaint}"):
        open_log(path)


@pytest.mark.parametrize("version", ["0.25.1", "0.30.0rc1", "0.33.0+cu130"])
def test_a_known_vllm_is_taken(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.24.0", "0.34.0", "1.0.0", "unknown"])
def test_another_vllm_is_refused_by_name(version):
    with pytest.raises(ConfigError, match=r"vllm='.*': must be 0\.25 to 0\.33"):
        check_version(version)


def test_an_aborted_request_is_noted_and_ends_in_the_log(vllm, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("LOCKSTEP_RECORD", str(path))
    scheduler = RecordingScheduler(vllm_config=vllm_config())
    scheduler.add_request(StandInRequest("a", range(6), 9, 4))
    output = scheduler.schedule()
    scheduler.update_from_output(output, [3])
    scheduler.finish_requests("a", SimpleNamespace())
    scheduler.add_request(StandInRequest("b", range(6), 1, 4))
    scheduler.update_from_output(scheduler.schedule(), [3])
    scheduler.shutdown()
    log = open_log(path)
    assert [request.reason for request in log.recording.requests] == ["abort", "length"]
    assert replay(log).difference is None
