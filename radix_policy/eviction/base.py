"""What an eviction policy is: six small functions that hear, and one that scores.

A policy never touches the tree. It hears what happened and gives each node a score: the lowest score goes first,
equal scores in LRU order (stamp, then node id). Scores may change at any event; they must not depend on wall time,
`hash()` of text, object ids or set order, since tensor-parallel ranks must agree.
"""

from abc import ABC
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.grouped_index import GroupedIndex
    from radix_policy.runtime import Request, World
    from radix_policy.sessions import Session


@dataclass(frozen=True)
class NoConfig:
    """A policy without keys of its own."""


class EvictionPolicy(ABC):
    """Base of every policy; the defaults make plain LRU."""

    name: ClassVar[str]
    Config: ClassVar[type] = NoConfig
    trims: bool = False  # may the last victim be cut instead of dropped whole
    trim_least: int = 1  # tokens that such a cut takes at least

    def __init__(self, world: "World", config: Any = None) -> None:
        self.world = world  # read-only view of agents, sessions, transitions, nodes and the clock
        self.config = config if config is not None else self.Config()

    def on_step(self, session: "Session", agent: int) -> None:
        """The session calls an agent (POOLED for an unknown one); nothing counts the call yet."""

    def on_request(self, request: "Request") -> None:
        """A request arrived; sessions and transitions already count it."""

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        """Its prefix was matched (once per request), before the nodes on `path` (shallow first) change owner."""

    def on_insert(self, node: Node, request: "Request | None") -> None:
        """A node was inserted, its owner already set; None when the request is unknown."""

    def on_split(self, prefix: Node, suffix: Node) -> None:
        """`prefix` was cut off `suffix`; give it a copy of what the policy keeps in `suffix.state`."""
        prefix.state = suffix.state

    def on_evict(self, node: Node) -> None:
        """The node's device KV is being dropped."""

    def on_restore(self, node: Node) -> None:
        """The node's KV is on the device again, after on_evict."""

    def on_finish(self, request: "Request") -> None:
        """A request left the engine."""

    def on_session(self, session: "Session") -> None:
        """A session ended (`session.ended`), was dropped from the table, or came back."""

    def on_reset(self) -> None:
        """The tree forgot every node."""

    def holds(self) -> bool:
        """Asked once per eviction call, after `refresh`: whether the scores hold for it; if not, LRU's order does."""
        return True

    def refresh(self) -> None:
        """Called once before each eviction call: bring cached tables up to date."""

    def score(self, node: Node) -> float:
        """What losing the node would cost, in the policy's own unit; smallest goes first."""
        return 0.0

    def tail(self, node: Node) -> int:
        """Tokens at the node's end that its score speaks for; whole pages."""
        return node.length

    def cut(self, node: Node, short: int, page: int) -> int:
        """How many tokens a victim loses, from its end, when `short` are still needed: all, unless the policy trims."""
        if not self.trims:
            return node.length
        drop, least = min(node.length, self.tail(node)), max(short, self.trim_least)
        return -(-least // page) * page if drop > least else drop

    def class_of(self, node: Node) -> Hashable | None:
        """Nodes of one class always share one score, whatever happens between two touches; None: alone.

        A node's class may change only when the node itself is touched, inserted, split or refiled
        (`World.refile(node)`).
        """
        return None

    def make_index(self) -> "GroupedIndex | None":
        """An index of leaves of the policy's own kind; None: one score per class (`LeafIndex`)."""
        return None

    def passing(self) -> list[object]:
        """State that belongs to tree nodes and live sessions, and goes with them; the rest is what was learned."""
        return []

    def snapshot(self) -> dict[str, Any]:
        """Numbers for status and metrics; small, JSON-ready."""
        return {}
