"""What a started runner reports about itself: agreed sizes, measured memory, start-up times."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts of one engine start; sizes are those that all ranks agreed on."""

    num_blocks: int
    block_size: int
    max_model_len: int
    device: str
    device_name: str
    dtype: str
    attention_backend: str
    tensor_parallel_size: int
    graph_sizes: tuple[int, ...] = ()
    memory_bytes: dict[str, int] = field(default_factory=dict)
    start_up_s: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    has_fast_all_reduce: bool = False

    def to_json(self) -> str:
        """Compact JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunnerInfo:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "graph_sizes": tuple(fields["graph_sizes"])})
