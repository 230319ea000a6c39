"""A trace with any wrong value is read or refused in one line, never a crash."""

import copy
import csv
import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import ConfigError, InputError
from sim.workloads.readers import TraceOptions, read_trace

CASES = Path(__file__).parents[1] / "data" / "case_traces"
JSON_CASES = sorted(path.name for path in CASES.iterdir() if path.suffix != ".csv")
CSV_CASES = sorted(path.name for path in CASES.iterdir() if path.suffix == ".csv")
WRONG = st.sampled_from(
    [None, "", "x", [], {}, [None], [1.5], ["x"], True, 0, -1, 1, 10**30, 1.5, 1e400, "1e400",
     {"value": 5}, [{}], [[]], "nan"]
)  # fmt: skip


def places(value, path=()):
    """The path of every value in a document."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield (*path, key)
            yield from places(part, (*path, key))


def read_or_refuse(path):
    for rate in (None, 2.0):
        options = TraceOptions(chars_per_token=4, output_tokens=5, rate=rate)
        try:
            trace = read_trace(path, options)
        except (InputError, ConfigError) as error:
            assert "\n" not in str(error)
            continue
        assert len(trace) > 0
        for row in range(len(trace)):
            assert len(trace.prompt(row)) == trace.prompt_tokens[row] > 0
            assert trace.output_tokens[row] > 0


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_json_trace_with_a_wrong_value_is_read_or_refused(data, tmp_path):
    name = data.draw(st.sampled_from(JSON_CASES))
    text = (CASES / name).read_text()
    whole = name.endswith(".json")
    rows = [json.loads(text)] if whole else [json.loads(line) for line in text.splitlines()]
    rows = copy.deepcopy(rows)
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from([p for p in places(rows) if len(p) > 1]))
        place = rows
        for key in parents:
            place = place[key]
        if isinstance(place, dict) and data.draw(st.booleans()):
            del place[last]
            if not place:
                break
        else:
            place[last] = copy.deepcopy(data.draw(WRONG))
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    read_or_refuse(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_csv_trace_with_a_wrong_value_is_read_or_refused(data, tmp_path):
    name = data.draw(st.sampled_from(CSV_CASES))
    rows = list(csv.reader((CASES / name).read_text().splitlines()))
    line = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[line]) - 1))
    rows[line][column] = str(data.draw(WRONG))
    path = tmp_path / name
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    read_or_refuse(path)
