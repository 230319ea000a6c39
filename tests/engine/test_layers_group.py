"""The TP group over real processes and gloo; without ranks it does nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.core.errors import ConfigError
from engine.parallel.group import TpGroup


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
        assert torch.equal(got["rows"], torch.cat((x, 2 * x), dim=0))
        assert torch.equal(got["columns"], torch.cat((x, 2 * x), dim=1))


def test_one_rank_communicates_with_nobody():
    x = torch.ones(2)
    assert TpGroup().all_reduce(x) is x
    assert TpGroup().all_gather(x) is x


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 1)])
def test_impossible_ranks_are_refused(rank, size):
    with pytest.raises(ConfigError):
        TpGroup(rank, size)
