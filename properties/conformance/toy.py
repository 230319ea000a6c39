"""A toy scheduler of another shape than the kernel, its adapter, and a version with a planted bug.

It runs prompts whole and first, has no prefix cache and no chunks, and preempts the newest. It
shows what an adapter looks like; the bug is the classic append rule off by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class ToyScheduler:
    """Dictionaries and lists, no reference counts."""

    def __init__(self, num_blocks: int, block_size: int, seats: int, budget: int) -> None:
        self.block_size, self.seats, self.budget = block_size, seats, budget
        self.pool = list(range(num_blocks))
        self.tokens: dict[int, int] = {}
        self.limits: dict[int, tuple[int, frozenset[int]]] = {}
        self.tables: dict[int, list[int]] = {}
        self.line: list[int] = []
        self.active: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def admit(self) -> list[tuple[int, int, int]]:
        """A batch of whole prompts from the front of the line."""
        batch: list[tuple[int, int, int]] = []
        left = self.budget
        while self.line and len(self.active) < self.seats:
            name = self.line[0]
            need = self.blocks_for(self.tokens[name])
            if need > len(self.pool) or self.tokens[name] > left:
                break
            self.tables[name] = [self.pool.pop(0) for _ in range(need)]
            self.active.append(self.line.pop(0))
            left -= self.tokens[name]
            batch.append((name, 0, self.tokens[name]))
        return batch

    def needs_block(self, name: int) -> bool:
        """Whether the newest token has no slot yet."""
        return self.blocks_for(self.tokens[name]) > len(self.tables[name])

    def decode(self) -> list[tuple[int, int, int]]:
        """One token for each active request, oldest first."""
        batch: list[tuple[int, int, int]] = []
        for name in list(self.active):
            if name not in self.active or len(batch) == self.budget:
                break
            while name in self.active and self.needs_block(name) and not self.pool:
                self.give_up(self.active[-1])
            if name not in self.active:
                break
            if self.needs_block(name):
                self.tables[name].append(self.pool.pop(0))
            batch.append((name, self.tokens[name] - 1, 1))
        return batch

    def give_up(self, name: int) -> None:
        """Sends a request back to the front of the line."""
        self.free(name)
        self.active.remove(name)
        self.line.insert(0, name)

    def free(self, name: int) -> None:
        """Returns all blocks of a request."""
        self.pool += reversed(self.tables.pop(name, []))


class BuggyToyScheduler(ToyScheduler):
    """Takes the next block one token late."""

    def needs_block(self, name: int) -> bool:
        """Off by one."""
        return self.blocks_for(self.tokens[name] - 1) > len(self.tables[name])


class ToyAdapter:
    """The adapter: plain values in, plain values out."""

    policy = "prefill_first"
    # It never cuts a prompt, so it refuses those that are longer than a step.
    # While seats are left it serves new prompts first, however long decodes wait.
    opt_out: Collection[str] = ("C1", "L9")
    kernel_options: Mapping[str, object] = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
        "bound_holders": True,
        "bound_decode_tokens": True,
        "bound_model_len": False,
    }
    scheduler_class: type[ToyScheduler] = ToyScheduler

    def start(self, config: Mapping[str, object]) -> None:
        """Builds the scheduler."""
        names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
        self.num_blocks, size, seats, budget = (int(str(config[name])) for name in names)
        self.toy = self.scheduler_class(self.num_blocks, size, seats, budget)

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues, or refuses what can never fit."""
        most = len(prompt) + max_tokens - 1
        if most > self.toy.budget or self.toy.blocks_for(most) > self.num_blocks:
            raise ValueError("larger than the pool or the budget")
        self.toy.tokens[request_id] = len(prompt)
        self.toy.limits[request_id] = (len(prompt) + max_tokens, frozenset(stop_token_ids))
        self.toy.line.append(request_id)

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Prompts first, else decodes."""
        return self.toy.admit() or self.toy.decode()

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Books tokens and ends requests."""
        ended: list[tuple[int, str]] = []
        for name, token in tokens.items():
            self.toy.tokens[name] += 1
            limit, stops = self.toy.limits[name]
            reason = "length" if self.toy.tokens[name] >= limit else ""
            if token in stops:
                reason = "stop"
            if reason:
                self.toy.free(name)
                self.toy.active.remove(name)
                ended.append((name, reason))
        return ended

    def waiting(self) -> Sequence[int]:
        """The line."""
        return self.toy.line

    def running(self) -> Sequence[int]:
        """The active ones."""
        return self.toy.active

    def block_table(self, request_id: int) -> Sequence[int]:
        """Its blocks."""
        return self.toy.tables.get(request_id, [])

    def num_free_blocks(self) -> int:
        """Size of the pool's list."""
        return len(self.toy.pool)

    def free_blocks(self) -> Sequence[int]:
        """The pool's list: the next block comes first."""
        return self.toy.pool


class BuggyToyAdapter(ToyAdapter):
    """The adapter of the toy with the planted bug."""

    scheduler_class = BuggyToyScheduler
