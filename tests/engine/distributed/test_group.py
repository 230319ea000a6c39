"""The TP group over real processes and gloo; without ranks it does nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.core.errors import ConfigError
from engine.distributed.group import TpGroup
from engine.distributed.one_shot import LARGEST_BYTES, OneShotAllReduce, connect_one_shot


def _rank(rank, size, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = TpGroup(rank, size)
    x = torch.arange(6.0).view(2, 3) * (rank + 1)
    reduced = x.clone()
    returned = group.all_reduce(reduced)
    torch.save(
        {
            "in place": returned is reduced,
            "reduced": reduced,
            "largest": group.all_reduce_max(torch.tensor([rank, -rank, 2**62 - rank])),
            "rows": group.all_gather(x, dim=0),
            "columns": group.all_gather(x.t().contiguous().t(), dim=-1),
        },
        results / f"{rank}.pt",
    )
    dist.destroy_process_group()


def test_collectives_over_gloo(tmp_path):
    mp.spawn(_rank, args=(2, tmp_path / "store", tmp_path), nprocs=2)
    x = torch.arange(6.0).view(2, 3)
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt")
        assert got["in place"]
        assert torch.equal(got["reduced"], 3 * x)
        assert got["largest"].tolist() == [1, 0, 2**62]
        assert torch.equal(got["rows"], torch.cat((x, 2 * x), dim=0))
        assert torch.equal(got["columns"], torch.cat((x, 2 * x), dim=1))


def test_one_rank_communicates_with_nobody():
    x = torch.ones(2)
    assert TpGroup().all_reduce(x) is x
    assert TpGroup().all_reduce_max(x) is x
    assert TpGroup().all_gather(x) is x


class Doubling:
    """Stands for two equal ranks, but only for small tensors."""

    def takes(self, t):
        return t.numel() <= 2

    def all_reduce(self, t):
        return t.mul_(2)


def test_a_faster_way_is_used_for_what_it_takes(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda t, group: t.mul_(10))
    group = TpGroup(0, 2, fast=Doubling())
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert group.all_reduce(torch.ones(3)).tolist() == [10, 10, 10]


def test_on_a_cpu_there_is_no_faster_way():
    assert connect_one_shot(0, 2, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("t", "taken"),
    [
        (torch.zeros(8, dtype=torch.bfloat16), True),
        (torch.zeros(LARGEST_BYTES // 4), True),
        (torch.zeros(LARGEST_BYTES // 4 + 1), False),
        (torch.zeros(0), False),
        (torch.zeros(8, 8).t(), False),
        (torch.zeros(9)[1:], False),
        (torch.zeros(8, dtype=torch.int64), False),
    ],
    ids=["small", "largest", "too large", "empty", "strided", "unaligned", "integers"],
)
def test_the_one_kernel_all_reduce_takes_small_aligned_floats(t, taken):
    nothing = torch.empty(0)
    assert OneShotAllReduce(0, nothing, nothing, nothing, None).takes(t) is taken


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 1)])
def test_impossible_ranks_are_refused(rank, size):
    with pytest.raises(ConfigError):
        TpGroup(rank, size)
