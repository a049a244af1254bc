"""The contract with a radix tree: what a tree tells (TreeListener) and what it can be told (TreeControl).

The simulator and the adapters around SGLang's tree cores implement both ends; `tests/tree/conformance` is one suite
for all of them. Node ids are ints that a tree never uses twice between two resets. A `stamp` is the tree's own logical
access clock (SGLang's `last_access_time`): larger is more recent, and LRU order is the order of stamps.

Residence: a node is *resident* while its KV is on the device. A tree with a host tier tells `demoted` when a node
lives on in the host tier only, `restored` when its KV is back. Without a host tier neither is ever called.
"""

from typing import Protocol

NodeId = int


class TreeListener(Protocol):
    """What a tree tells, in the order in which it happens."""

    def reset(self, root: NodeId) -> None:
        """Every node is gone; `root` is the new root (never evicted, zero tokens)."""

    def added(self, node: NodeId, parent: NodeId, length: int, start: int, stamp: float, rid: str | None) -> None:
        """A leaf of `length` tokens was inserted below `parent`, `start` tokens from the root, by request `rid`."""

    def split(self, prefix: NodeId, suffix: NodeId, at: int, prefix_stamp: float, suffix_stamp: float) -> None:
        """`suffix` lost its first `at` tokens to the new node `prefix`, which took its place below its parent.

        The prefix inherits the suffix's locks, residence and identity; the suffix keeps its id and children.
        """

    def touched(self, node: NodeId, stamp: float) -> None:
        """A match or an insert walked over the node."""

    def reached(self, node: NodeId, stamp: float) -> None:
        """A match or an insert walked from the root to the node: `touched` for all on the way, in one."""

    def counted(self, node: NodeId) -> None:
        """An insert passed the node: SGLang's `hit_count` rose by one."""

    def locked(self, node: NodeId) -> None:
        """Every node from here up to the root holds one more lock."""

    def unlocked(self, node: NodeId) -> None:
        """Every node from here up to the root holds one lock less."""

    def demoted(self, node: NodeId) -> None:
        """The node's device KV was dropped, its host copy stays in the tree."""

    def restored(self, node: NodeId) -> None:
        """The node's KV is on the device again (load-back, or recomputed by an insert)."""

    def removed(self, node: NodeId) -> None:
        """The node left the tree. Only a node without children can."""


class TreeControl(Protocol):
    """What a tree can be told. Calls are answered by the matching TreeListener calls before they return."""

    def evict(self, node: NodeId) -> int:
        """Drop a resident unlocked leaf from the device; returns the tokens freed."""
        ...

    def trim(self, node: NodeId, keep: int) -> int:
        """Split the leaf after its first `keep` tokens (a page boundary) and drop the tail; returns tokens freed."""
        ...
