"""Messages between the front end's process and the engine's, however the bytes are cut."""

import socket

from hypothesis import given
from hypothesis import strategies as st

from engine.async_llm.wire import (
    Abort,
    Add,
    Begin,
    Close,
    End,
    EngineEnd,
    FrameReader,
    FromEngine,
    Outputs,
    Stats,
    ToEngine,
    frame,
    ids_from_bytes,
    ids_to_bytes,
)

NUMBERS = st.integers(0, 2**40)
ADDS = st.builds(
    Add,
    NUMBERS,
    st.lists(st.integers(0, 2**62), max_size=50).map(ids_to_bytes),
    NUMBERS,
    st.dictionaries(st.text(max_size=5), st.none() | st.integers(-5, 5) | st.floats(0, 1)),
    st.integers(-(2**63), 2**63 - 1),
)
MESSAGES = st.lists(ADDS | st.builds(Abort, st.lists(NUMBERS)) | st.builds(Close), max_size=8)


@given(MESSAGES, st.lists(st.integers(1, 40), max_size=200))
def test_messages_come_out_as_they_went_in(messages, cuts):
    data = b"".join(map(frame, messages))
    reader, found, start = FrameReader(ToEngine), [], 0
    for length in cuts:
        found += reader.feed(data[start : start + length])
        start += length
    found += reader.feed(data[start:])
    assert found == messages


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_ids_come_back(ids):
    assert [*ids_from_bytes(ids_to_bytes(ids))] == ids


def outputs(step):
    place = [(5, -0.5, 1), (7, -1.5, 2)]
    begin = Begin(step, 10, 0, [None, place])
    end = End(step, "length", None, 0, None)
    stats = Stats(1, 0, 0.5, *([0] * 7))
    return Outputs(step, [step] * 100, [*range(100)], [place] * 100, [begin], [end], stats)


def test_an_engine_whose_front_end_is_busy_neither_waits_nor_loses_anything():
    ours, theirs = socket.socketpair()
    with ours:
        end = EngineEnd(theirs)
        for step in range(500):  # far more than the socket holds
            end.send(outputs(step))
            assert end.receive(None) == []
        ours.sendall(frame(Close()))
        reader, found = FrameReader(FromEngine), []
        while len(found) < 500:
            ours.settimeout(0.05)
            try:
                found += reader.feed(ours.recv(1 << 16))
            except TimeoutError:
                # What is left goes with the next step.
                end.send(outputs(500))
        assert found[:500] == [outputs(step) for step in range(500)]
        assert end.receive(1.0) == [Close()]
        end.close()


def test_an_end_whose_other_end_is_gone_says_so():
    ours, theirs = socket.socketpair()
    end = EngineEnd(theirs)
    ours.close()
    assert end.receive(1.0) == [] and not end.is_open
    end.send(outputs(1))
    end.close()
