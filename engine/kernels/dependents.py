"""Launch arguments of kernels that may start before the one ahead of them has ended.

Such a kernel waits (`gdc_wait`) before it reads or writes what others share, and then lets the next
one start in turn: what is saved is the time between two launches.
"""

from __future__ import annotations

import torch

from engine.kernels.rows_linear import can_launch_dependents


def early_launch(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """The kernel's argument PDL, and the launch attribute where the device has it."""
    if wanted and can_launch_dependents(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
