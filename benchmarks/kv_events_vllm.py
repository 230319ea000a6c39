"""Compares KV events with those of vLLM's own code: hashes of blocks, and decoding of messages.

    pip download vllm==0.33.0 --no-deps -d FOLDER && unzip FOLDER/vllm-*.whl -d FOLDER
    python benchmarks/kv_events_vllm.py FOLDER [--write FIXTURE]

vLLM's files are read from the unpacked wheel and only the definitions that matter are run, so that
neither torch nor a GPU is needed. `--write` keeps what vLLM gives, for the tests.
"""

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.kv_events.block_hash import block_hasher
from engine.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
BLOCKS = [list(range(16)), [151643, 0, 7, *range(100, 113)], [2**31 - 1] * 16]
SALTS = (None, "tenant-1")
SEEDS = (None, "0", "lockstep")


def definitions(path, names, scope):
    """Runs the named top-level definitions of a file, in its order, within `scope`."""
    body = []
    for node in ast.parse(path.read_text()).body:
        targets = [one.id for one in getattr(node, "targets", []) if isinstance(one, ast.Name)]
        if getattr(node, "name", None) in names or set(targets) & names:
            body.append(node)
    found = {getattr(node, "name", None) for node in body}
    missing = {name for name in names if name not in found and not name.isupper()}
    assert not missing, f"{path} does not define {missing}"
    module = ast.Module(body, type_ignores=[])
    exec(compile(module, str(path), "exec"), scope)
    return scope


def hashes_of(folder):
    """vLLM's digests: by algorithm, seed and salt, a chain of blocks."""
    import hashlib
    import pickle

    import cbor2
    import xxhash

    names = {"sha256", "sha256_cbor", "_xxhash_digest", "xxhash", "xxhash_cbor"}
    hashing = {"hashlib": hashlib, "pickle": pickle, "cbor2": cbor2, "_xxhash": xxhash, "Any": Any}
    definitions(folder / "vllm/utils/hashing.py", names, hashing)
    utils = {
        "os": os,
        "Callable": Callable,
        "Any": Any,
        "Sequence": Sequence,
        "BlockHash": bytes,
        "Iterable": Iterable,
        "xxhash": hashing["xxhash"],
        "xxhash_cbor": hashing["xxhash_cbor"],
    }
    wanted = {"resolve_none_hash_seed", "hash_block_tokens", "DEFAULT_NONE_HASH_SEED"}
    wanted |= {"_NON_CRYPTO_HASH_FUNCTIONS"}
    path = folder / "vllm/v1/core/kv_cache_utils.py"
    definitions(path, wanted, utils)
    rows = []
    for algorithm in ALGORITHMS:
        for seed in SEEDS:
            if seed is None and algorithm.startswith("xxhash"):
                continue  # random
            set_seed(seed)
            function = hashing[algorithm]
            utils["NONE_HASH"] = function(utils["resolve_none_hash_seed"](function))
            for salt in SALTS:
                parent, chain = None, []
                for index, block in enumerate(BLOCKS):
                    keys = (("cache_salt", salt),) if salt and not index else None
                    parent = utils["hash_block_tokens"](function, parent, block, keys)
                    chain.append(parent.hex())
                rows.append({"algorithm": algorithm, "seed": seed, "salt": salt, "chain": chain})
    set_seed(None)
    return rows


def set_seed(seed):
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed


def our_chain(row):
    set_seed(row["seed"])
    hasher = block_hasher(row["algorithm"])
    set_seed(None)
    parent, chain = hasher.none_hash, []
    for index, block in enumerate(BLOCKS):
        keys = (("cache_salt", row["salt"]),) if row["salt"] and not index else None
        parent = hasher.block(parent, tuple(block), keys)
        chain.append(parent.hex())
    return chain


def messages_of(folder):
    """vLLM's classes; ours are decoded by them, and theirs are encoded for the fixture."""
    names = {"EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared"}
    scope = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int}
    return definitions(
        folder / "vllm/distributed/kv_events.py",
        names | {"KVEventBatch"},
        scope | {"__name__": "v"},
    )


def batch_of(classes):
    """One batch of every event, of vLLM's classes or of ours, with the same values."""
    stored, removed, cleared, batch = classes
    keywords = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    events = [
        stored([1, 2**64 - 1], None, [5] * 32, 16, None, "GPU", None, [("a",), None], **keywords),
        stored([b"x" * 32], b"y" * 32, [6] * 16, 16, None, "GPU", None, [None], **keywords),
        removed([1], "GPU", 0),
        cleared(),
    ]
    return batch(1700000000.25, events, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rows = hashes_of(args.folder)
    wrong = [row for row in rows if our_chain(row) != row["chain"]]
    theirs = messages_of(args.folder)
    names = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
    batch = batch_of([theirs[name] for name in (*names, "KVEventBatch")])
    ours = msgspec.msgpack.encode(
        batch_of([BlockStored, BlockRemoved, AllBlocksCleared, KvEventBatch])
    )
    encoded = msgspec.msgpack.encode(batch)
    # vLLM's structs have more fields, so that their maps may have a longer head in msgpack.
    is_same = msgspec.msgpack.decode(encoded) == msgspec.msgpack.decode(ours)
    is_read = msgspec.msgpack.decode(ours, type=theirs["KVEventBatch"]) == batch
    print(f"{len(rows) - len(wrong)} of {len(rows)} chains of hashes are equal")
    print(f"messages: {'equal' if is_same else 'different'} values,"
          f" vLLM's classes read them {'right' if is_read else 'wrong'}")  # fmt: skip
    if args.write:
        fixture = {"vllm": "0.33.0", "blocks": BLOCKS, "chains": rows, "batch": encoded.hex()}
        args.write.write_text(json.dumps(fixture, indent=1) + "\n")
    sys.exit(bool(wrong) or not (is_same and is_read))


if __name__ == "__main__":
    main()
