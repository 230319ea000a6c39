"""The way of KV blocks between a server's pool and the host tier behind it, and the time it takes.

Both directions share the link. The copies of a step come before it, or run beside it: then the
longer of the two is what the step takes. A cost model's own figures know nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.plan import KvCopy


@dataclass(frozen=True, slots=True)
class HostLink:
    """Each GPU copies its own share of a block, `block_bytes`, all of them side by side."""

    block_bytes: int
    gb_per_s: float
    overlaps: bool

    def step_ns(self, duration_ns: int, copies: tuple[KvCopy, ...]) -> int:
        """How long a step takes together with its copies."""
        copy_ns = round(len(copies) * self.block_bytes / self.gb_per_s)
        return max(duration_ns, copy_ns) if self.overlaps else duration_ns + copy_ns
