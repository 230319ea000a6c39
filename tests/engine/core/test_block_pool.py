import pytest

from engine.core.block_pool import BlockPool
from engine.core.errors import KernelBug
from engine.core.free_list import FreeList
from engine.core.hashing import PrefixIndex


def test_free_list_keeps_order_under_removal_from_anywhere():
    blocks = FreeList()
    for block in (4, 0, 7, 2):
        blocks.push(block)
    blocks.remove(7)
    assert list(blocks) == [4, 0, 2]
    assert blocks.pop() == 4
    blocks.push(7)
    assert (list(blocks), len(blocks)) == ([0, 2, 7], 3)


def make_pool(unregistered_first, num_blocks=8, serve_newest=False):
    index = PrefixIndex(64)
    return BlockPool(num_blocks, index, unregistered_first, serve_newest), index


def test_unregistered_blocks_are_reused_first_and_last_block_of_the_table_before_all():
    pool, index = make_pool(unregistered_first=True)
    table = pool.take(4)
    pool.register(table[0], index.intern(index.root(()), range(0, 4)))
    pool.release(table)
    assert pool.free_order() == [3, 2, 1, 4, 5, 6, 7, 0]


def test_without_that_rule_all_freed_blocks_queue_up_tail_first():
    pool, _ = make_pool(unregistered_first=False)
    pool.release(pool.take(3))
    assert pool.free_order() == [3, 4, 5, 6, 7, 2, 1, 0]


def test_a_double_free_raises():
    pool, _ = make_pool(unregistered_first=True)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(KernelBug, match="B9"):
        pool.release(table)


@pytest.mark.parametrize(("serve_newest", "expected"), [(False, [0, 1]), (True, [1, 0])])
def test_losing_one_copy_keeps_the_other_findable(serve_newest, expected):
    pool, index = make_pool(True, num_blocks=2, serve_newest=serve_newest)
    node = index.intern(index.root(()), range(0, 4))
    for block in pool.take(2):
        pool.register(block, node)
    assert pool.copy_of(node) == expected[0]
    pool.unregister(expected[0])
    assert pool.copy_of(node) == expected[1]


def test_memory_of_the_pool_follows_use_and_not_size():
    pool, _ = make_pool(True, num_blocks=10**12)
    pool.release(pool.take(3))
    assert pool.num_touched == 3
    assert pool.num_free == 10**12


def test_index_forgets_nodes_that_nothing_needs_and_keeps_those_that_children_need():
    pool, index = make_pool(True, num_blocks=3)
    parent = index.intern(index.root(()), range(0, 4))
    child = index.intern(parent, range(4, 8))
    first, second = pool.take(2)
    pool.register(first, parent)
    pool.register(second, child)
    pool.unregister(first)
    assert index.intern(index.root(()), range(0, 4)) is parent
    pool.unregister(second)
    assert len(index) == 0


def test_colliding_hashes_never_return_a_foreign_node():
    index = PrefixIndex(1)
    root = index.root(())
    nodes = [index.intern(root, range(i, i + 4)) for i in range(10)]
    for node in nodes:
        node.ref_count += 1
    assert len({id(node) for node in nodes}) == 10
    assert [index.intern(root, range(i, i + 4)) for i in range(10)] == nodes
    for node in nodes[::2]:
        index.dereference(node)
    assert len(index) == 5


def test_extra_keys_are_separated_by_their_type():
    index = PrefixIndex(64)
    salt, adapter = index.root((("salt", "X"),)), index.root((("adapter", "X"),))
    assert index.intern(salt, range(4)) is not index.intern(adapter, range(4))
    assert salt.hash != adapter.hash != index.root(()).hash
