"""LAW-L11 and LAW-M12: long runs leave every container small, and planted leaks are found."""

from __future__ import annotations

import pytest

from engine.core.scheduler import Scheduler
from properties.defects.growth import LEAKS
from properties.follower.view import LawBroken
from properties.search.sizes import long_run, sizes_of
from properties.timed_runs.long_runs import long_runs


def test_a_long_run_leaves_every_container_of_the_kernel_small() -> None:
    long_run()


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: str(leak.__name__))
def test_a_leak_is_found(leak: type[Scheduler]) -> None:
    with pytest.raises(LawBroken, match="LAW-L11"):
        long_run(leak)  # type: ignore[arg-type]


def test_long_runs_leave_every_container_of_a_server_small() -> None:
    long_runs()


class _Holder:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


def test_the_walk_sees_through_objects_slots_and_containers() -> None:
    shared = [1, 2, 3]
    found = sizes_of(_Holder({"a": (_Holder([*range(7)]), shared), "b": shared}))
    assert found == {"_Holder.inner": 2 + 2 + 7 + 3}
