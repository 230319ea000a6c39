"""Every part of the engine follows HF's counterpart, and a wrong part is noticed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from golden.components.attention import attention_results
from golden.components.layers import Place, normal, rope_results
from golden.components.sampling import (
    NUM_DRAWS,
    chi_square_limit,
    draw,
    sampler_results,
    toy_logits,
)
from golden.parts import COMPONENTS, component_cases
from golden.results import CaseResult
from golden.suite import ATTENTION, CPU_DTYPES
from golden.vector_rules import three_way


def require_all(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Fails with every broken row; skipped rows alone are no success."""
    rows = list(results)
    broken = [f"{row.name}: {row.detail}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert any(row.status == "pass" for row in rows)
    return rows


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.parametrize("part", [*COMPONENTS, *(f"attention {name}" for name in ATTENTION)])
def test_component_follows_hf(part: str, dtype: torch.dtype, cpu: torch.device) -> None:
    cases = component_cases(Place(cpu, dtype), ATTENTION)
    [case] = [case for _, name, case in cases if name.startswith(f"{part} (")]
    require_all(case())


def test_sampler_draws_from_the_softmax_whatever_the_batch(cpu: torch.device) -> None:
    require_all(sampler_results(cpu))


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_a_rope_theta_one_percent_off_fails_every_scaling_type(
    dtype: torch.dtype, cpu: torch.device
) -> None:
    rows = list(rope_results(Place(cpu, dtype), theta_factor=1.01))
    tables = [row for row in rows if "table" in row.name]
    assert len(tables) == 4
    assert all(row.status == "fail" for row in tables)


def test_a_backend_that_is_missing_here_is_listed_with_its_reason(cpu: torch.device) -> None:
    rows = list(attention_results("flash_attn", Place(cpu, torch.bfloat16), (256,)))
    assert [row.status for row in rows] == ["skip"]
    assert "flash_attn" in rows[0].detail


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_an_error_of_one_part_in_twenty_is_noticed(dtype: torch.dtype, cpu: torch.device) -> None:
    truth = normal((8, 64), 3, Place(cpu, dtype)).float()
    rounded = truth.to(dtype)
    assert not three_way(rounded, truth, rounded, dtype).violations
    assert three_way(truth * 1.05, truth, rounded, dtype).violations


def test_draws_at_a_wrong_temperature_fail_the_chi_square_test(cpu: torch.device) -> None:
    logits = toy_logits(23, cpu)
    counts = draw(logits, NUM_DRAWS, 1.05).double()
    expected = torch.softmax(logits.double(), dim=-1) * NUM_DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) > chi_square_limit(22)
