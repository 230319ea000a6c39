"""Mutants that change nothing, each with the reason; kept beside the suite and not as pragmas.

A pragma switches off a whole line with all its other mutants. Here the exact change is named: the
function, and the line before and after without indentation. A change that is not listed and
survives is a hole.
"""

from __future__ import annotations

# (function, line before, line after) -> why nobody can tell them apart
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "Scheduler.abort",
        "self._aborting[request_id] = None",
        'self._aborting[request_id] = ""',
    ): "the dict is an ordered set: its values are never read",
    (
        "Scheduler.run_decode",
        "if num_steps > 1:",
        "if num_steps >= 1:",
    ): "with one step the loop inside is empty, and a run without steps books nothing",
    (
        "Scheduler.run_decode",
        "step = self._begin_step(tokens_open=False)",
        "step = self._begin_step(tokens_open=None)",
    ): "only the truth of the flag is read",
    (
        "Scheduler.run_decode",
        "step = self._begin_step(tokens_open=False)",
        "step = self._begin_step(tokens_open=True)",
    ): "keys then come with the commit of the same step, before anybody looks for one",
    (
        "PrefillFirstPolicy._prefill_next",
        "hits = NO_HITS",
        "hits = None",
    ): "a prompt that holds blocks has computed a token, so its hits are never looked at",
    (
        "PrefillFirstPolicy._prefill_next",
        "return False",
        "return True",
    ): "a cut prompt has used up the budget, so the next round of the loop ends at once",
    (
        "BlockManager.cache_full_blocks",
        "if not self.caching or num_full <= sequence.num_cached_blocks:",
        "if not self.caching or num_full < sequence.num_cached_blocks:",
    ): "with nothing new to seal the loop below is empty",
    (
        "BlockManager.cache_full_blocks",
        "self.cached_in_step[block_id] = None",
        'self.cached_in_step[block_id] = ""',
    ): "the dict is an ordered set: its values are never read",
    (
        "BlockManager.release",
        "sequence.num_cached_blocks = 0",
        "sequence.num_cached_blocks = None",
    ): "admission sets it again before anybody reads it",
    (
        "BlockManager.release",
        "sequence.num_cached_blocks = 0",
        "sequence.num_cached_blocks = 1",
    ): "admission sets it again before anybody reads it",
    (
        "BlockManager.forget_chain",
        "sequence.chain = []",
        "sequence.chain = None",
    ): "the sequence has ended and is not looked at again",
    (
        "BlockManager._extend_chain",
        "if len(chain) >= num_blocks:",
        "if len(chain) > num_blocks:",
    ): "nothing is added, and the deepest node gains and loses one pin (a root stays anyway)",
    (
        "BlockManager._content",
        "if stop <= known:",
        "if stop < known:",
    ): "the general case at the end gives the same content",
    (
        "BlockManager._content",
        "if start >= known:",
        "if start > known:",
    ): "the general case at the end gives the same content",
    (
        "BlockManager._content",
        "return content_of(sequence.output_token_ids[start - known : stop - known])",
        "return content_of(sequence.output_token_ids[start - known : stop + known])",
    ): "a block of outputs gets its key when its last token is the newest, so nothing lies behind",
    (
        "BlockManager._content",
        "return content_of(prompt.tokens(start, known) + sequence.output_token_ids[: stop - known])",
        "return content_of(prompt.tokens(start, known) + sequence.output_token_ids[: stop + known])",
    ): "a block of outputs gets its key when its last token is the newest, so nothing lies behind",
    (
        "FreeList.push",
        "missing = place + 1 - len(newer)",
        "missing = place + 2 - len(newer)",
    ): "the arrays are one place longer than needed",
    (
        "FreeList.push",
        "if missing > 0:",
        "if missing >= 0:",
    ): "extending by nothing changes nothing",
    (
        "ChainNode.__init__",
        "self.collision: ChainNode | None = None",
        'self.collision: ChainNode | None = ""',
    ): "intern sets it before a node can be found; roots are in no bucket",
    (
        "Scheduler._commit",
        "pairs = [p for p in zip(sampled, token_ids, strict=True) if p[0] not in dropped]",
        "pairs = [p for p in zip(sampled, token_ids, strict=None) if p[0] not in dropped]",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._commit",
        "pairs = [p for p in zip(sampled, token_ids, strict=True) if p[0] not in dropped]",
        "pairs = [p for p in zip(sampled, token_ids, strict=False) if p[0] not in dropped]",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._commit",
        "pairs = [p for p in zip(sampled, token_ids, strict=True) if p[0] not in dropped]",
        "pairs = [p for p in zip(sampled, token_ids, ) if p[0] not in dropped]",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "by_id = dict(zip(record.sampled_ids, token_ids, strict=True))",
        "by_id = dict(zip(record.sampled_ids, token_ids, strict=None))",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "by_id = dict(zip(record.sampled_ids, token_ids, strict=True))",
        "by_id = dict(zip(record.sampled_ids, token_ids, strict=False))",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "by_id = dict(zip(record.sampled_ids, token_ids, strict=True))",
        "by_id = dict(zip(record.sampled_ids, token_ids, ))",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "for request_id, token_id in zip(plan.decode.request_ids, column, strict=True):",
        "for request_id, token_id in zip(plan.decode.request_ids, column, strict=None):",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "for request_id, token_id in zip(plan.decode.request_ids, column, strict=True):",
        "for request_id, token_id in zip(plan.decode.request_ids, column, strict=False):",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "for request_id, token_id in zip(plan.decode.request_ids, column, strict=True):",
        "for request_id, token_id in zip(plan.decode.request_ids, column, ):",
    ): "the lengths were compared before, so strictness never matters",
    (
        "Scheduler._book_tokens",
        "if decodes.takes_columns_of(plan.decode):",
        "if decodes.takes_columns_of(None):",
    ): "columns are a shortcut: booking row by row gives the same outputs",
    (
        "BlockManager.__init__",
        "self.cached_in_step: dict[int, None] = {}",
        "self.cached_in_step: dict[int, None] = None",
    ): "every step begins with a dict of its own",
    (
        "MixedPolicy._allot",
        "break",
        "return",
    ): "running requests never ask for more than the budget, so it ends with the last of them",
    (
        "Scheduler.run_decode",
        "if offset < num_steps - 1 and self.state.decodes.is_uneventful():",
        "if offset < num_steps - 2 and self.state.decodes.is_uneventful():",
    ): "one more step is done the long way, with the same result",
    (
        "DecodeSet.join",
        "if last is not None and last.admission_index > sequence.admission_index:",
        "if last is not None and last.admission_index >= sequence.admission_index:",
    ): "no two sequences have one admission_index, so the two are never equal",
    (
        "DecodeSet.leave_batch",
        "sequence.decoding = False",
        "sequence.decoding = None",
    ): "only the truth of the flag is read",
    (
        "DecodeSet.sync_all_outputs",
        "sequence.num_synced = 0",
        "sequence.num_synced = None",
    ): "it is only the start of a slice, and a slice from None begins at 0 as well",
    (
        "KernelState.preempt",
        "sequence.num_preemptions += 1",
        "sequence.num_preemptions = 1",
    ): "only whether it is above 0 is read",
    (
        "KernelState.preempt",
        "sequence.num_preemptions += 1",
        "sequence.num_preemptions += 2",
    ): "only whether it is above 0 is read",
    (
        "KernelState.run",
        "self._next_admission += 1",
        "self._next_admission += 2",
    ): "admissions are only compared with one another, so the distance between them is free",
    (
        "Chunk.token_ids",
        'tokens = self.prompt.tokens(start, min(stop, known)) if start < known else array("q")',
        "tokens = self.prompt.tokens(start, min(stop, known)) if (start < known) or True "
        'else array("q")',
    ): "positions behind the prompt give an empty array of the same kind",
    (
        "Chunk.token_ids",
        'tokens = self.prompt.tokens(start, min(stop, known)) if start < known else array("q")',
        'tokens = self.prompt.tokens(start, min(stop, known)) if start <= known else array("q")',
    ): "no position lies between start and the end of the prompt, so the array is empty",
    (
        "Chunk.token_ids",
        "if stop > known:",
        "if stop >= known:",
    ): "a chunk that ends with its prompt is extended by outputs 0 up to 0, which are none",
    (
        "Ending.reasons",
        "for request_id, token_id in zip(sampled, token_ids, strict=True):",
        "for request_id, token_id in zip(sampled, token_ids, strict=None):",
    ): "the lengths were compared before, so strictness never matters",
    (
        "StepPlan.entries",
        "for request_id, base in zip(decode.request_ids, decode.base_positions, strict=True):",
        "for request_id, base in zip(decode.request_ids, decode.base_positions, strict=None):",
    ): "both tuples are made from the same rows and cannot change",
    (
        "Ending.reasons",
        "for request_id, token_id in zip(sampled, token_ids, strict=True):",
        "for request_id, token_id in zip(sampled, token_ids, strict=False):",
    ): "the lengths were compared before, so strictness never matters",
    (
        "StepPlan.entries",
        "for request_id, base in zip(decode.request_ids, decode.base_positions, strict=True):",
        "for request_id, base in zip(decode.request_ids, decode.base_positions, strict=False):",
    ): "both tuples are made from the same rows and cannot change",
    (
        "Ending.reasons",
        "for request_id, token_id in zip(sampled, token_ids, strict=True):",
        "for request_id, token_id in zip(sampled, token_ids, ):",
    ): "the lengths were compared before, so strictness never matters",
    (
        "StepPlan.entries",
        "for request_id, base in zip(decode.request_ids, decode.base_positions, strict=True):",
        "for request_id, base in zip(decode.request_ids, decode.base_positions, ):",
    ): "both tuples are made from the same rows and cannot change",
    (
        "Step._plan_chunks",
        "newest = rows[-1].admission_index if rows else 0",
        "newest = rows[-1].admission_index if rows else 1",
    ): "admissions begin with 1, and without rows no row is older either way",
    (
        "Step._plan_chunks",
        "if sequence.admission_index < newest:  # only with a long-prefill threshold",
        "if sequence.admission_index <= newest:  # only with a long-prefill threshold",
    ): "a sequence with a chunk is no row, so the two are never equal",
    (
        "Step._plan_chunks",
        "older = sum(1 for row in rows if row.admission_index < sequence.admission_index)",
        "older = sum(1 for row in rows if row.admission_index <= sequence.admission_index)",
    ): "a sequence with a chunk is no row, so the two are never equal",
    (
        "DecodeSet.make_batch",
        "sequence.num_synced = 0",
        "sequence.num_synced = None",
    ): "it is only the start of a slice, and a slice from None begins at 0 as well",
    (
        "DecodeSet.make_batch",
        "self._generation += 1",
        "self._generation += 2",
    ): "generations only have to grow",
    (
        "DecodeSet.make_batch",
        "self._stale = self._gapped = False",
        "self._stale = self._gapped = None",
    ): "only the truth of the flags is read",
    (
        "Sequence.__init__",
        "self.num_cached_blocks = 0  # leading blocks of the table that have a key",
        "self.num_cached_blocks = None  # leading blocks of the table that have a key",
    ): "admission sets it before anybody reads it",
    (
        "Sequence.__init__",
        "self.num_cached_blocks = 0  # leading blocks of the table that have a key",
        "self.num_cached_blocks = 1  # leading blocks of the table that have a key",
    ): "admission sets it before anybody reads it",
    (
        "Sequence.__init__",
        "self.decoding = False",
        "self.decoding = None",
    ): "only the truth of the flag is read",
    (
        "Sequence.__init__",
        "self.base = 0",
        "self.base = None",
    ): "it is read only while the sequence decodes, and joining the decode set sets it",
    (
        "Sequence.__init__",
        "self.base = 0",
        "self.base = 1",
    ): "it is read only while the sequence decodes, and joining the decode set sets it",
    (
        "Sequence.__init__",
        "self.row = 0",
        "self.row = 1",
    ): "whoever does not stand in that row of the batch absorbs nothing",
    (
        "Sequence.__init__",
        "self.num_synced = 0",
        "self.num_synced = None",
    ): "it is read only of rows of the batch, and getting a row sets it",
    (
        "Sequence.__init__",
        "self.num_synced = 0",
        "self.num_synced = 1",
    ): "it is read only of rows of the batch, and getting a row sets it",
    (
        "DecodeSet.__init__",
        "self.clock = 0",
        "self.clock = 1",
    ): "only base + clock means anything, and bases are taken from the clock",
    (
        "DecodeSet.__init__",
        "self.batch = NO_DECODES",
        "self.batch = None",
    ): "a step without rows books nothing, as a column or one by one",
    (
        "DecodeSet.__init__",
        "self._stale = False  # whether members have changed since `batch` was made",
        "self._stale = None  # whether members have changed since `batch` was made",
    ): "the first step with rows makes a batch anyway, which sets it",
    (
        "DecodeSet.__init__",
        "self._stale = False  # whether members have changed since `batch` was made",
        "self._stale = True  # whether members have changed since `batch` was made",
    ): "the first step with rows makes a batch anyway, which sets it",
    (
        "DecodeSet.__init__",
        "self._gapped = False  # whether a row of `batch` left it since then",
        "self._gapped = None  # whether a row of `batch` left it since then",
    ): "only the truth of the flag is read",
    (
        "DecodeSet.__init__",
        "self._gapped = False  # whether a row of `batch` left it since then",
        "self._gapped = True  # whether a row of `batch` left it since then",
    ): "nobody has a row before the first batch, which sets it",
    (
        "DecodeSet.__init__",
        "self._generation = 0",
        "self._generation = 1",
    ): "generations only have to grow",
    (
        "DecodeSet.__init__",
        "self._run: list[Seq[int]] | None = None  # the same, by row, during a run of steps",
        'self._run: list[Seq[int]] | None = ""  # the same, by row, during a run of steps',
    ): "nobody has a row before the first batch, which sets it",
    (
        "DecodeSet.__init__",
        "self._run_steps = 0",
        "self._run_steps = None",
    ): "nobody has a row before the first batch, which sets it",
    (
        "DecodeSet.__init__",
        "self._run_steps = 0",
        "self._run_steps = 1",
    ): "nobody has a row before the first batch, which sets it",
    (
        "KernelState.__init__",
        "self._next_admission = 1",
        "self._next_admission = 2",
    ): "admissions are only compared with one another and with the 0 of who never ran",
}
