"""The laws of blocks, cache, writes, steps, tightness and liveness."""

from __future__ import annotations

from functools import partial

from properties.defects import decisions, growth
from properties.defects import prefix_cache as cache
from properties.defects import tables as blocks
from properties.defects.probed import SkipsChunkToken, UncheckedConfig
from properties.laws.registry import ASYNC, BOTH, EXACT, FCFS, PRIORITY, UNPERTURBED, Law
from properties.search import probes, sizes

_F = "properties.follower.follower:Follower"
_B = "properties.follower.pool_picture:BlockPicture"
_T = "properties.follower.tightness"
_E = "properties.follower.endings"
_M = "properties.follower.moves"
_A = "engine.core.audit"
_P = "properties.search.probes"
_D = "properties.search.driver:Driver"


def _by_table(law: str, sentence: str, holds: str, *checks: str) -> Law:
    """A law whose canaries are planted defects of the kernel."""
    return Law(law, sentence, holds, checks)


BLOCK_LAWS = (
    _by_table(
        "B1",
        "Free and used block ids are disjoint, and together exactly 0 .. num_blocks - 1.",
        BOTH,
        f"{_B}.take_new",
        f"{_E}:compare_state",
        f"{_A}:audit",
    ),
    _by_table("B2", "No id is twice in the free queue.", BOTH, f"{_E}:compare_state"),
    _by_table(
        "B3",
        "A block's reference count is the number of live tables that contain it.",
        BOTH,
        f"{_B}.release",
        f"{_A}:audit",
    ),
    _by_table("B4", "A block is used if and only if its count is >= 1.", BOTH, f"{_A}:audit"),
    _by_table("B5", "A block id is at most once in one table.", BOTH, f"{_F}._write"),
    _by_table(
        "B6",
        "A live table has exactly ceil(reserved / B) entries; who waits without having started, "
        "or was preempted, has none.",
        BOTH,
        f"{_F}._write",
        f"{_E}:compare_state",
    ),
    _by_table(
        "B7",
        "A sequence gets a new block exactly when the position to be written needs one.",
        BOTH,
        f"{_F}._write",
    ),
    _by_table("B8", "An allocation that fails has changed nothing.", BOTH, f"{_E}:compare_state"),
    Law(
        "B9",
        "Freeing a sequence twice changes nothing; freeing a block twice is an error.",
        BOTH,
        (f"{_P}:double_free",),
        partial(probes.alarm, probes.double_free, blocks.IgnoresDoubleFree),
        "IgnoresDoubleFree",
    ),
    Law(
        "B10",
        "Allocating and freeing restores the free set, the counts and the used set.",
        BOTH,
        (f"{_P}:round_trip",),
        partial(probes.alarm, probes.round_trip, blocks.LeaksFirstBlock),
        "LeaksFirstBlock",
    ),
    _by_table(
        "B11",
        "A prefix block is never evicted before its extension.",
        EXACT,
        f"{_B}.check_eviction_order",
    ),
)

CACHE_LAWS = (
    _by_table(
        "K1",
        "Only full blocks carry a key: once computed (prefill_first), or from the step that "
        "fills them on (mixed).",
        BOTH,
        f"{_F}._check_hits",
        f"{_A}:audit",
    ),
    Law(
        "K2",
        "A block's key depends on its tokens, its whole prefix and its typed extra keys only, in "
        "any process.",
        BOTH,
        (f"{_P}:hash_chain", f"{_P}:hash_across_processes"),
        partial(probes.alarm, probes.hash_chain, cache._UntypedIndex),
        "MixesExtraKeys",
    ),
    _by_table(
        "K3",
        "A key maps to exactly the blocks registered under it: none is stale, none is lost.",
        BOTH,
        f"{_A}:audit",
    ),
    _by_table(
        "K4",
        "A hit block and all its ancestors hold the tokens of the sequence that hits it.",
        BOTH,
        f"{_F}._check_hits",
    ),
    _by_table(
        "K5", "A hit block is held before anything else is allocated.", BOTH, f"{_B}.take_new"
    ),
    _by_table("K6", "A block that was handed out again cannot be hit.", BOTH, f"{_F}._check_hits"),
    _by_table(
        "K7",
        "At most ceil(n / B) - 1 blocks are hit: one token is always computed.",
        BOTH,
        f"{_F}._admit",
    ),
    _by_table("K8", "Hits form a prefix.", BOTH, f"{_F}._check_hits"),
    _by_table("K9", "Blocks are handed out in the policy's order.", EXACT, f"{_B}.take_new"),
    _by_table(
        "K10",
        "A failed or deferred admission leaves free order, keys and counts as they were.",
        BOTH,
        f"{_E}:compare_state",
    ),
    _by_table("K11", "With a hash of 1 to 8 bits all outputs are still right.", BOTH, f"{_E}:end"),
)

WRITE_LAWS = (
    _by_table("W1", "Slots written in one step are distinct.", BOTH, f"{_F}._write"),
    _by_table(
        "W2",
        "No slot of a shared block is written, except by its owner in the step that keys it.",
        BOTH,
        f"{_F}._write",
    ),
    _by_table(
        "W3",
        "No slot of a keyed block is written, except in the step that keys it.",
        BOTH,
        f"{_F}._write",
    ),
    _by_table(
        "W4", "Every scheduled position has a slot in the sequence's table.", BOTH, f"{_F}._write"
    ),
    _by_table("W5", "The positions of an entry are c .. c + s - 1.", BOTH, f"{_F}._check_entry"),
    _by_table(
        "V1",
        "Each slot that is read holds KV of exactly this sequence's tokens up to there.",
        BOTH,
        f"{_F}.execute",
    ),
)

STEP_LAWS = (
    _by_table(
        "S1",
        "A step computes at most max_num_batched_tokens tokens.",
        BOTH + " (prefill_first's decode steps: with bound_decode_tokens)",
        f"{_F}._check_step",
    ),
    _by_table(
        "S2",
        "At most max_num_seqs entries, and as many sequences that hold blocks.",
        BOTH + " (prefill_first's holders: with bound_holders)",
        f"{_F}._check_step",
    ),
    _by_table("S3", "s >= 1, s = 1 for a decode, and c + s <= n.", BOTH, f"{_F}._check_entry"),
    _by_table("S4", "A live request is in exactly one queue.", BOTH, f"{_E}:compare_state"),
    _by_table(
        "S5",
        "0 <= c <= n, and c = n - 1 for a decoding sequence between steps.",
        BOTH,
        f"{_E}:compare_state",
    ),
    _by_table(
        "S6",
        "Preemption puts a request at the head of waiting with c = 0 and without blocks; a step "
        "that preempts admits nobody.",
        BOTH,
        f"{_F}.on_schedule",
        f"{_E}:compare_state",
    ),
    _by_table("S7", "Who is preempted in a step is not in its batch.", BOTH, f"{_F}._check_step"),
    _by_table(
        "S8",
        "At most one prompt is half done (without a threshold), and nobody overtakes it.",
        UNPERTURBED,
        f"{_F}._check_partials",
    ),
    _by_table(
        "S9",
        "First tokens come in order of arrival (without a threshold and without spread prefill).",
        FCFS,
        f"{_E}:commit",
    ),
    _by_table(
        "S10", "The victim is the most recently arrived running request.", FCFS, f"{_M}:preempt"
    ),
    Law(
        "S11",
        "The same calls give the same decisions: no clock, no randomness, no state elsewhere.",
        BOTH,
        (f"{_P}:determinism", f"{_P}:hash_across_processes"),
        partial(probes.alarm, probes.determinism, decisions.KeepsClassState),
        "KeepsClassState",
    ),
    _by_table(
        "S12",
        "A token is sampled exactly where an entry ends with its known tokens.",
        BOTH,
        f"{_F}._check_entry",
        f"{_E}:commit",
    ),
    _by_table(
        "S13",
        "The victim is the running request with the largest (priority, arrival).",
        PRIORITY,
        f"{_M}:preempt",
    ),
    _by_table(
        "S14",
        "Waiting is ordered by (priority, arrival), victims included.",
        PRIORITY,
        f"{_E}:compare_state",
    ),
)

ASYNC_LAWS = (
    _by_table(
        "A1",
        "A request whose token in flight ends it for its length gets nothing more (P-P2).",
        ASYNC,
        f"{_F}._check_entry",
    ),
    _by_table(
        "A2",
        "What a step in flight computes for an ended request is thrown away (P-P3), and the "
        "request's blocks are free from the commit on that ends it (P-P4).",
        ASYNC,
        f"{_E}:commit",
        f"{_E}:compare_state",
    ),
    _by_table(
        "A3",
        "The token in flight of a preempted request is appended while it waits, and may end it "
        "there (P-P7).",
        ASYNC,
        f"{_E}:commit",
    ),
    _by_table(
        "A4",
        "A step that fails takes those after it along: all their keys and all their requests.",
        ASYNC,
        f"{_E}:discard",
    ),
)

TIGHTNESS_LAWS = (
    _by_table("T1", "A hit is as long as the cache allows.", EXACT, f"{_T}:admission"),
    _by_table(
        "T2",
        "If the head of waiting fits and it is its turn, it is scheduled.",
        EXACT,
        f"{_T}:after_step",
    ),
    _by_table(
        "T3",
        "A prompt is cut only where budget or threshold end; running requests are served while "
        "the step has room.",
        EXACT,
        f"{_T}:after_step",
    ),
    _by_table(
        "T4",
        "Nobody is preempted unless an older request, or it itself, lacks blocks.",
        EXACT,
        f"{_T}:leftover_victims",
    ),
    _by_table(
        "T5",
        "An admission needs exactly what is counted: hits, free hits, watermark and new blocks.",
        EXACT,
        f"{_T}:admission",
    ),
)

LIFE_LAWS = (
    _by_table("L1", "A step schedules at least one token.", BOTH, f"{_F}._check_step"),
    _by_table("L2", "The oldest live request is never preempted.", FCFS, f"{_M}:preempt"),
    _by_table(
        "L3",
        "Once arrivals stop, all requests end within the bound of liveness_bound().",
        BOTH,
        f"{_D}.liveness_bound",
        f"{_E}:drained",
    ),
    _by_table(
        "L4",
        "Added = waiting + running + ended, by id, at all times.",
        BOTH,
        f"{_E}:compare_state",
        f"{_E}:drained",
    ),
    _by_table("L5", "After the last request no block is used.", BOTH, f"{_E}:drained"),
    _by_table(
        "L6",
        "`stop` if and only if the last token stops, `length` if and only if a limit is reached; "
        "nothing follows.",
        BOTH,
        f"{_E}:commit",
    ),
    _by_table(
        "L7", "1 <= outputs <= max_tokens, returned as they were sampled.", BOTH, f"{_E}:end"
    ),
    _by_table("L8", "An abort frees exactly its own references.", BOTH, f"{_F}.on_abort"),
    _by_table(
        "L9",
        "A decode is passed over at most 4 steps in a row, also while prompts keep arriving.",
        "`mixed`, unperturbed, no threshold or spread prefill (not prefill_first, by design)",
        "properties.follower.fairness:after_step",
    ),
    _by_table(
        "L10",
        "Nobody is preempted in a step in which a later arrival gains blocks.",
        UNPERTURBED,
        "properties.follower.fairness:after_step",
    ),
    Law(
        "L11",
        "Nothing that is kept grows with the steps and requests that have passed.",
        BOTH,
        ("properties.search.sizes:long_run",),
        partial(probes.alarm, sizes.long_run, growth.EntersLimitsAnew),
        "EntersLimitsAnew, KeepsSalts, RemembersTheEnded, KeepsNodes",
    ),
    _by_table(
        "C1",
        "A request that can never run is rejected before anything changes; a just fitting one "
        "completes.",
        BOTH + ", with reject_impossible",
        f"{_D}.add",
    ),
    Law(
        "C2",
        "Impossible configurations are refused at construction.",
        BOTH,
        (f"{_P}:impossible_configs",),
        partial(probes.alarm, probes.impossible_configs, UncheckedConfig),
        "UncheckedConfig",
    ),
)

END_TO_END_LAWS = (
    _by_table("E1", "Outputs equal those of the request alone.", BOTH, f"{_E}:end"),
    Law(
        "E2",
        "Chunked prefill gives the outputs of unchunked.",
        BOTH,
        (f"{_P}:chunk_independence",),
        partial(probes.alarm, probes.chunk_independence, SkipsChunkToken),
        "SkipsChunkToken",
    ),
    Law(
        "E3",
        "Outputs do not depend on batch, order of arrival, pool, cache, hash width, policy or "
        "perturbations.",
        BOTH,
        (f"{_P}:output_independence", "properties.defects.perturb:Perturbed"),
        partial(probes.alarm, probes.output_independence, cache.TrustsHash),
        "TrustsHash",
    ),
    _by_table("E4", "Preemption does not change the tokens.", BOTH, f"{_E}:end"),
    _by_table(
        "E5",
        "Tokens computed = sum of (prompt + outputs - 1) + lost by preemptions and aborts - hits.",
        BOTH,
        f"{_E}:drained",
    ),
)

KERNEL_LAWS: tuple[Law, ...] = (
    *BLOCK_LAWS,
    *CACHE_LAWS,
    *WRITE_LAWS,
    *STEP_LAWS,
    *ASYNC_LAWS,
    *TIGHTNESS_LAWS,
    *LIFE_LAWS,
    *END_TO_END_LAWS,
)
