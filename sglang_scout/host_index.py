"""The leaves of the host tier in an index of their own: which one goes next, without scoring each of them.

Fed by the tree core (tree.HostLeaves and its other overrides) and not by the NodeTable, which knows the device's leaves
only. So it does not rely on having been told of every access: a leaf that was touched and not filed again is a fault.
"""

from collections.abc import Hashable

from radix_policy.grouped_index import GroupedDrain, GroupedIndex, _Class
from radix_policy.nodes import Node


class HostIndex(GroupedIndex):
    """Beside the device's index, which reads the policy's changes; LookupError where it was not told everything."""

    def drain(self, lru: bool = False) -> GroupedDrain:
        """As GroupedIndex. Which sessions have ended or come back since the last time only the device's is told."""
        self._file_told()
        for group, home in [*self._groups.items()]:
            if home.dead != self._policy.is_dead(group):
                (self.exhume if home.dead else self.bury)(group)
        return super().drain(lru)

    def _head(self, group: Hashable, key: Hashable, leaves: _Class) -> Node | None:
        node = super()._head(group, key, leaves)
        if node is not None and self._filed[node.id].stamp != node.stamp:
            raise LookupError(f"node {node.id} of the host tier was used, and the index was not told")
        return node
