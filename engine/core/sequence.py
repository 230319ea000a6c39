"""The kernel's state of one request."""

from __future__ import annotations

from array import array

from engine.core.hashing import ChainNode
from engine.core.request import Request, RequestId


class Sequence:
    """A live request: its tokens, its block table and how far it has been computed.

    While it decodes, its number of tokens is `base + clock` of the decode set, so that a step
    need not touch it; `num_computed` then is that number less one. Otherwise `num_computed` is
    kept here. `outputs` may lag behind by columns that the decode set has not yet absorbed.
    """

    __slots__ = (
        "absorbed",
        "base",
        "chain",
        "decoding",
        "limit",
        "num_computed",
        "num_sealed",
        "outputs",
        "preemptions",
        "prompt",
        "request",
        "request_id",
        "root",
        "row",
        "serial",
        "table",
    )

    def __init__(self, request: Request, limit: int) -> None:
        self.request = request
        self.request_id: RequestId = request.request_id
        self.prompt = request.prompt
        self.limit = limit  # the number of tokens at which it ends with reason `length`
        self.outputs: array[int] = array("q")
        self.table: list[int] = []
        self.num_computed = 0
        self.num_sealed = 0  # leading blocks of the table that have a key
        self.chain: list[ChainNode] = []  # keys of its full blocks, as far as they were needed
        self.root: ChainNode | None = None
        self.decoding = False
        self.base = 0
        self.serial = 0  # place in running: grows with each admission
        self.row = 0
        self.absorbed = 0
        self.preemptions = 0

    @property
    def num_known(self) -> int:
        """Prompt and absorbed outputs."""
        return len(self.prompt) + len(self.outputs)

    def __repr__(self) -> str:
        state = "decoding" if self.decoding else f"{self.num_computed} computed"
        return f"Sequence({self.request_id!r}, {state}, {len(self.table)} blocks)"
