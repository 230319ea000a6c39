"""Recordings of asynchronous vLLM runs: replayed exactly, and refused in one line where wrong."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from places import SHARED
from recording_testing import make_async_recording, write_document

from engine.cli import main
from engine.steplog.api import AddRecord
from engine.steplog.replay import replay
from engine.steplog.vllm_recording import open_log

FOLDER = SHARED / "traces" / "measured_h200_async"
NAMES = ("conv_40", "conv_70", "conv_90", "prefix_60")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "made.json.gz"
    return path, make_async_recording(path)


def changed(made, tmp_path, change):
    document = json.loads(json.dumps(made[1]))
    change(document)
    path = tmp_path / "changed.json.gz"
    write_document(path, document)
    return path


def later_end(updates):
    """Moves the first end to the update behind."""
    place = next(place for place, update in enumerate(updates) if update[3])
    updates[place + 1][3].append(updates[place][3].pop())


def test_an_asynchronous_recording_replays_without_a_difference(made):
    result = replay(open_log(made[0]))
    assert result.difference is None
    assert (result.num_requests, result.num_live) == (60, 0)
    assert result.num_steps == len(made[1]["steps"])


@pytest.mark.shared
@pytest.mark.skipif(not FOLDER.is_dir(), reason="the recordings are not beside the repository")
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_makes_all_decisions_of_vllm_at_its_defaults(name):
    result = replay(open_log(FOLDER / f"{name}.json.gz"))
    assert result.difference is None
    assert result.num_live == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["steps"][40].__setitem__(7, document["steps"][40][7] - 1),
        lambda document: document["steps"][40].__setitem__(5, document["steps"][40][5] + 1),
        lambda document: later_end(document["updates"]),
        lambda document: document["steps"][0][3][0].__setitem__(1, 16),
    ],
    ids=["free blocks", "running", "ends", "hits"],
)
def test_a_changed_decision_is_found(made, tmp_path, change):
    assert replay(open_log(changed(made, tmp_path, change))).difference is not None


def test_steps_stand_in_order_and_end_when_their_results_came(made):
    ends = [1000 * update[1] for update in made[1]["updates"]]
    steps = [record for record in open_log(made[0]) if not isinstance(record, AddRecord)]
    assert [step.start_ns + step.duration_ns for step in steps] == ends
    assert all(one.start_ns + one.duration_ns <= two.start_ns for one, two in pairwise(steps))
    assert {step.open_plans for step in steps} == {0, 1}


def test_admissions_may_be_listed_in_any_order_and_who_comes_again_is_resumed(made, tmp_path):
    # The recording lists them backwards, as one of new and resumed requests apart may.
    document = made[1]
    several = [step for step in document["steps"] if len(step[3]) > 1]
    assert several
    for step in open_log(made[0]):
        if not isinstance(step, AddRecord):
            order = [entry.request_id for entry in step.entries]
            places = [order.index(admission.request_id) for admission in step.admitted]
            assert places == sorted(places)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("needs updates", lambda document: document.pop("updates")),
        ("truncated", lambda document: document["updates"].pop()),
        ("updates[5]", lambda document: document["updates"][5].__setitem__(0, 7)),
        ("updates[6]", lambda document: document["updates"][6].__setitem__(1, 0)),
        ("steps[3]", lambda document: document["steps"][3].pop()),
        ("token_gaps_us", lambda document: document["requests"][2].update(token_gaps_us=[-1])),
    ],
)
@pytest.mark.parametrize("verb", ["replay", "calibrate"])
def test_a_wrong_recording_is_one_line_and_exit_2(made, tmp_path, capsys, place, change, verb):
    words = ["sim", verb, str(changed(made, tmp_path, change))]
    if verb == "calibrate":
        words += ["--model", "qwen3-8b", "--hardware", "h200", "--out", str(tmp_path / "out.json")]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert place in message
