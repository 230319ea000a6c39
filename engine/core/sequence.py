"""The kernel's state of one request."""

from __future__ import annotations

from array import array

from engine.core.hashing import ChainNode
from engine.core.request import Request, RequestId


class Sequence:
    """A live request: its tokens, its block table and how far it has been computed.

    While it decodes, its number of tokens is `base + clock` of the decode set, so that a step
    need not touch it; `num_computed_tokens` then is that number less one. Otherwise it
    is kept here. `output_token_ids` may lag behind by columns that the decode set still keeps.
    """

    __slots__ = (
        "admission_index",
        "arrival",
        "arrival_index",
        "base",
        "block_table",
        "chain",
        "decoding",
        "limit",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_preemptions",
        "num_synced",
        "output_token_ids",
        "prompt",
        "request",
        "request_id",
        "root",
        "row",
    )

    def __init__(self, request: Request, limit: int) -> None:
        self.request = request
        self.request_id: RequestId = request.request_id
        self.prompt = request.prompt
        self.limit = limit  # the number of tokens at which it ends with reason `length`
        self.output_token_ids: array[int] = array("q")
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_blocks = 0  # leading blocks of the table that have a key
        self.chain: list[ChainNode] = []  # keys of its full blocks, as far as they were needed
        self.root: ChainNode | None = None
        self.decoding = False
        self.base = 0
        self.arrival = 0  # moment of arrival, by the caller's clock or counted
        self.arrival_index = 0  # place in the order in which requests were added
        self.admission_index = 0  # place in running: grows with each admission
        self.row = 0
        self.num_synced = 0
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, without those that the decode set still keeps as columns."""
        return len(self.prompt) + len(self.output_token_ids)

    def __repr__(self) -> str:
        state = "decoding" if self.decoding else f"{self.num_computed_tokens} computed"
        return f"Sequence({self.request_id!r}, {state}, {len(self.block_table)} blocks)"
