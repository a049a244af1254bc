"""What every prompt of an agent begins with: the tokens that warmup prefills.

Per (namespace, agent) the beginning of one recent prompt is kept, and how far each of the latest prompts of other
sessions agreed with the one before it. The anchor is as long as the shortest of these agreements, and its tokens are
the latest prompt's: so it is a prefix of all of them, an agent whose system prompt changed is not warmed with the old
one, and the new one is trusted once COMPARED prompts in a row have it. A session's own prompts agree in its
conversation too and say nothing, except where one of them leaves the anchor.

Unlike the anchors of `radix_policy.anchors`, which tell agents apart, these are kept for tagged agents alike, and only
for the few agents that were called last.
"""

from collections import OrderedDict, deque

from radix_policy.events import Prompt
from radix_policy.nodes import UNKNOWN

COMPARED = 4  # agreements between consecutive prompts that the anchor rests on
Key = tuple[str, int]  # (namespace, agent)


class Anchor:
    """One agent's. `space` is the engine's own description of the namespace."""

    __slots__ = ("agreed", "head", "key", "session", "space")

    def __init__(self, key: Key, space: object, head: Prompt, session: int) -> None:
        self.key = key
        self.space = space
        self.head = head  # the first tokens of a recent prompt
        self.session = session  # whose prompt that is
        self.agreed: deque[int] = deque(maxlen=COMPARED)  # tokens that consecutive prompts shared, the latest last

    @property
    def length(self) -> int:
        """Tokens of the anchor; 0 while only one session is known to have called the agent."""
        return min(self.agreed, default=0)


class Anchors:
    """The anchors of the agents that were called last."""

    def __init__(self, keep: int, tokens: int) -> None:
        """At most `keep` anchors of at most `tokens` tokens each."""
        self.keep, self.tokens = keep, tokens
        self._anchors: OrderedDict[Key, Anchor] = OrderedDict()  # the one called longest ago first

    def __len__(self) -> int:
        return len(self._anchors)

    def get(self, namespace: str, agent: int) -> Anchor | None:
        """The agent's anchor, or None; it may still be of no length."""
        return self._anchors.get((namespace, agent))

    def seen(self, namespace: str, agent: int, session: int, prompt: Prompt, space: object = None) -> None:
        """The agent was called with this prompt; `session` UNKNOWN: by nobody knows whom."""
        key = (namespace, agent)
        anchor = self._anchors.get(key)
        if anchor is None:
            self._anchors[key] = Anchor(key, space, self._head(prompt), session)
            while len(self._anchors) > self.keep:
                self._anchors.popitem(last=False)
            return
        self._anchors.move_to_end(key)
        agreed = prompt.agree(anchor.head, 0)
        if session == anchor.session != UNKNOWN and agreed >= anchor.length:
            return
        anchor.agreed.append(agreed)
        anchor.head, anchor.session, anchor.space = self._head(prompt), session, space

    def _head(self, prompt: Prompt) -> Prompt:
        return prompt.slice(0, min(len(prompt), self.tokens))

    def drop(self, key: Key) -> None:
        """Forget one anchor."""
        self._anchors.pop(key, None)
