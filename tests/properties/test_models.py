"""The model in Promela and the kernel make the same steps; needs no model checker."""

import json

import pytest

from properties.defects import asynchrony
from properties.models.__main__ import DEFECTS, RECORD, TRACES, model_hash
from properties.models.calls import call_of, read_calls
from properties.models.replay import Disagreement, Scope, replay, replay_graph
from properties.models.spin import events

FILE = json.loads(TRACES.read_text())
SCOPE = Scope(**FILE["scope"])
TRACE_LIST = [[call_of(values) for values in trace] for trace in FILE["traces"]]
# Their harm is a wrong answer to an id or a void token, which the model does not speak of.
NOT_MODELLED = {asynchrony.ReusesVoidIds, asynchrony.ReportsVoidTokens}
MODELLED = sorted(
    {mutant.factory for mutant in asynchrony.MUTANTS} - NOT_MODELLED, key=lambda make: make.__name__
)


def test_every_trace_of_the_model_is_a_run_of_the_kernel():
    assert len(TRACE_LIST) > 100
    for trace in TRACE_LIST:
        replay(SCOPE, trace)


def test_the_traces_meet_every_event_that_the_model_names():
    met = {event for trace in TRACE_LIST for call in trace for event in call.met}
    assert met == set(events())
    reasons = {end.reason for trace in TRACE_LIST for call in trace for end in call.ended}
    assert reasons == {"stop", "length", "abort", "error"}
    names = {call.name for trace in TRACE_LIST for call in trace}
    assert names == {"add", "schedule", "run", "commit", "abort", "discard"}


@pytest.mark.parametrize("make", MODELLED)
def test_the_replay_notices_a_kernel_that_breaks_an_asynchronous_rule(make):
    with pytest.raises((Disagreement, AssertionError)):
        for trace in TRACE_LIST:
            replay(SCOPE, trace, make)


def test_traces_and_record_are_of_this_model_and_its_planted_defects_were_found():
    record = json.loads(RECORD.read_text())
    assert FILE["model"] == record["model"] == model_hash(), "run `make model`"
    assert [check["errors"] for check in record["checks"].values()] == [0, 0]
    assert {*record["planted"]} == {*DEFECTS.values()}
    assert all(found["errors"] and found["violated"] for found in record["planted"].values())
    assert record["replayed_calls"] > 100_000


PRINTED = """
depth 3
call ADD 1 1 0
open 0
free 0 1 2
keys 0 0 0
request WAITING 1 0 0 0
request GONE 0 0 0 0
done
depth 7
call ABORT 0 0 0
ended 0 ABORTED 1
open 0
free 0 1 2
keys 0 0 0
request GONE 0 0 0 0
request GONE 0 0 0 0
done
depth 7
call SCHEDULE 0 0 0
open 1
free 1 2
keys 0 0 0
request RUNNING 1 1 1 0 0
request GONE 0 0 0 0
done
depth 8
call SCHEDULE 0 0 0
open 2
"""


def test_a_graph_is_replayed_branch_by_branch_and_a_call_cut_short_is_left_out():
    calls = list(read_calls(PRINTED.splitlines()))
    assert [(call.depth, call.name) for call in calls] == [
        (3, "add"),
        (7, "abort"),
        (7, "schedule"),
    ]
    assert replay_graph(SCOPE, calls) == 3
    wrong = calls[2]._replace(after=calls[2].after._replace(free=(2, 1)))
    with pytest.raises(Disagreement, match="schedule"):
        replay_graph(SCOPE, [*calls[:2], wrong])
