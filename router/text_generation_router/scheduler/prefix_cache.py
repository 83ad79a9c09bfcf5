"""Which KV blocks hold which tokens, so that a text which begins alike is not computed again.

A full block is known by its tokens and the block before it, back to the beginning of the text: the
keys of a dict, which are compared in full. Two texts share a block only if all tokens up to its end
are the same, whatever their hashes.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from text_generation_router.scheduler.blocks import BlockAllocator

Tokens = tuple[int, ...]
# Where a text begins: texts of different salts share nothing, whatever their tokens.
Salt = Hashable


@dataclass(slots=True, eq=False)
class _Node:
    """One block that holds known tokens."""

    serial: int
    # The node of the block before it; None for the first of a text.
    parent: "_Node | None"
    key: tuple[Hashable, Tokens]
    block_id: int
    children: "set[_Node]" = field(default_factory=set)


@dataclass(slots=True)
class Chain:
    """How much of one request's text is in the cache; changed by the PrefixCache alone."""

    # The serial of the last node, or the salt when there is none.
    tail: Hashable
    num_blocks: int = 0


@dataclass(slots=True)
class PendingBlocks:
    """Blocks that the step which is put together now will write; of no use after it is launched."""

    blocks: dict[tuple[Hashable, Tokens], tuple[object, int]] = field(default_factory=dict)


class PrefixCache:
    """Owns the knowledge of what is in the blocks; who holds them is the BlockAllocator's business.

    Promises: `match` returns blocks whose KV was written for just these tokens in just this place,
    or will be by the step that is put together now. Every node can be reached from its salt.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        allocator.forget = self._forget
        self._serials = count()
        self._by_key: dict[tuple[Hashable, Tokens], _Node] = {}
        self._by_serial: dict[Hashable, _Node] = {}
        self._by_block: dict[int, _Node] = {}

    def __len__(self) -> int:
        """How many blocks are known."""
        return len(self._by_block)

    def match(
        self, salt: Salt, blocks: Iterable[Tokens], pending: PendingBlocks
    ) -> tuple[list[int], Chain]:
        """The blocks that hold the beginning of a text, given as the tokens of its full blocks.

        Those that are only promised are not in the Chain yet; `publish` adds them.
        """
        chain = Chain(salt)
        block_ids: list[int] = []
        pending_tail: Hashable = None
        for tokens in blocks:
            node = self._by_key.get((chain.tail, tokens)) if pending_tail is None else None
            if node is not None:
                block_ids.append(node.block_id)
                chain.tail, chain.num_blocks = node.serial, chain.num_blocks + 1
                continue
            tail = chain.tail if pending_tail is None else pending_tail
            expected = pending.blocks.get((tail, tokens))
            if expected is None:
                break
            pending_tail, block_id = expected
            block_ids.append(block_id)
        return block_ids, chain

    def expect(
        self,
        chain: Chain,
        blocks: Iterable[Tokens],
        block_ids: Iterable[int],
        pending: PendingBlocks,
    ) -> None:
        """Notes that a step writes the blocks behind `chain`."""
        tail: Hashable = chain.tail
        for tokens, block_id in zip(blocks, block_ids, strict=False):
            if (node := self._by_key.get((tail, tokens))) is not None:
                tail = node.serial
            else:
                tail, _ = pending.blocks.setdefault((tail, tokens), (object(), block_id))

    def publish(self, chain: Chain, blocks: Iterable[Tokens], block_ids: Iterable[int]) -> None:
        """Makes the blocks behind `chain` known: their KV has been written, and a table holds them.

        Where the same tokens are known in another block, the text goes on behind that one.
        """
        for tokens, block_id in zip(blocks, block_ids, strict=False):
            parent = self._by_serial.get(chain.tail)
            if chain.num_blocks and parent is None:
                return  # what this text went on behind is forgotten
            node = self._by_key.get((chain.tail, tokens))
            if node is None:
                node = self._add(parent, (chain.tail, tokens), block_id)
            elif node.block_id != block_id and not self._allocator.is_held(node.block_id):
                self._replace(node, block_id)
            chain.tail, chain.num_blocks = node.serial, chain.num_blocks + 1

    def integrity(self) -> None:
        """Asserts the invariants of the class."""
        assert len(self._by_key) == len(self._by_serial) == len(self._by_block)
        for key, node in self._by_key.items():
            assert node.key == key and self._by_serial[node.serial] is node
            assert self._by_block[node.block_id] is node
            assert node.parent is not None or not isinstance(key[0], int), "out of reach"
            if node.parent is not None:
                assert self._by_serial[node.parent.serial] is node.parent, "out of reach"
                assert node in node.parent.children and key[0] == node.parent.serial
            assert all(child.parent is node for child in node.children)

    def _add(self, parent: _Node | None, key: tuple[Hashable, Tokens], block_id: int) -> _Node:
        node = _Node(next(self._serials), parent, key, block_id)
        if parent is not None:
            parent.children.add(node)
        self._by_key[key] = self._by_serial[node.serial] = self._by_block[block_id] = node
        self._allocator.keep(block_id)
        return node

    def _replace(self, node: _Node, block_id: int) -> None:
        """Another block with the same tokens, which is in use, takes the place of an idle one."""
        self._allocator.discard(node.block_id)
        del self._by_block[node.block_id]
        node.block_id = block_id
        self._by_block[block_id] = node
        self._allocator.keep(block_id)

    def _forget(self, block_id: int) -> None:
        """The allocator has given a block away: it and what can only be reached through it go."""
        first = self._by_block[block_id]
        if first.parent is not None:
            first.parent.children.remove(first)
        for node in list(_with_descendants(first)):
            del self._by_key[node.key], self._by_serial[node.serial], self._by_block[node.block_id]
            if node is not first:
                self._allocator.discard(node.block_id)


def _with_descendants(node: _Node) -> Iterator[_Node]:
    rest = [node]
    while rest:
        node = rest.pop()
        yield node
        rest += node.children
