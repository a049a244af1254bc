"""Sessions from tokens: which earlier call a prompt continues.

A thread is what one agent sees of one session; a talk is a session: the threads of all its agents. In order:

1. A prompt continues a thread when the thread's last prompt stands in it, except for an end of at most 1,024 tokens
   that the agent may rewrite each time (`MARKS`: 16 tokens each, some way before the end).
2. A prompt that repeats a thread's first one after the thread went on is a new session with the same task.
3. A prompt that opens a thread belongs to the talk whose other agents' prompts go on with the same words after their
   own anchors (group chat): found by runs of 8 tokens, so that anchors need not be cut at the same word.
4. A prompt that agrees with a thread in all that is known of it, but continues it nowhere, is the same session when its
   agent is not known to append to its prompts and the thread was heard of lately, and a new one else.
5. Else it opens a session. With fewer than 4 tokens behind the anchor, the session is unknown.
"""

from collections import OrderedDict

import numpy as np

from radix_policy.anchors import AnchorForest, Landing
from radix_policy.events import Prompt
from radix_policy.prefix_tree import Node

MARKS = (16, 160, 1024)  # tokens before a prompt's end at which a few of its tokens are kept
_MARK = 16  # so many each time
_SLACK = 16  # tokens at the end of a prompt that the next one need not repeat: the generation prompt
_GRAM = 8  # tokens in a run by which talks are found
_SPREAD = 8  # one run in so many is kept
_SEARCH = 65536  # tokens at a prompt's end in which an earlier prompt's end is searched
_OVER, _OVER_PACES = 64, 8  # calls, and usual gaps in a thread of the agent, after which silence means over
_PACE = 0.05  # weight of a new gap in the mean
_FEW = 4  # threads kept per leaf, and talks per run: the latest

Mark = tuple[int, bytes]  # (tokens up to its end, the token ids as they lie in memory)


class Talk:
    """One session."""

    __slots__ = ("key", "threads")

    def __init__(self, key: str) -> None:
        self.key = key
        self.threads: dict[int, Thread] = {}  # by agent, the latest of each


class Thread:
    """One agent's side of a session."""

    __slots__ = ("called", "calls", "first", "first_mark", "head", "last", "marks", "node", "talk")

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.calls = 0
        self.called = 0  # number of its latest call among all calls
        self.first = 0  # tokens in the first prompt
        self.first_mark: Mark | None = None
        self.last = 0  # tokens in the latest prompt
        self.marks: tuple[Mark, ...] = ()
        self.node: Node | None = None  # the anchor that `head` stands behind
        self.head: np.ndarray = _NOTHING  # the first tokens behind it


_NOTHING = np.zeros(0, dtype=np.uint64)
_POWERS = np.array([pow(0x9E3779B97F4A7C15, i, 1 << 64) for i in range(_GRAM)], dtype=np.uint64)
_SHIFT, _FACTOR = np.uint64(29), np.uint64(0xBF58476D1CE4E5B9)
_TOP = np.uint64(64 - _SPREAD.bit_length() + 1)


class Sessions:
    """Infers the session of each call; state is bounded by the forest's leaves and by `cap` runs."""

    def __init__(self, forest: AnchorForest, cap: int) -> None:
        self._forest = forest
        self._cap = cap
        self._next = 0
        self._calls = 0
        self._runs: OrderedDict[tuple[str, int], list[tuple[Thread, int]]] = OrderedDict()

    def resolve(self, prompt: Prompt, namespace: str, landing: Landing, agent: int) -> str | None:
        """The session's key, or None. `agent`: any number that is the agent's own."""
        anchor = landing.anchor
        start = anchor.end if anchor is not None else 0
        self._calls += 1
        if len(prompt) - start < 4 or landing.leaf.end <= start:
            return None
        thread = self._branched(prompt, landing, start) if landing.forked else self._landed(prompt, landing, start)
        if thread is None:
            self._next += 1
            thread = Thread(Talk(f"~{self._next}"))
        if anchor is not None:
            self._link(thread, prompt, namespace, anchor, agent)
        if anchor is not None and thread.calls:
            gap = min(self._calls - thread.called, _OVER + 2 * anchor.pace)  # one long silence tells little
            anchor.pace += _PACE * (gap - anchor.pace)
        thread.called = self._calls
        threads = landing.leaf.threads
        if not threads or threads[-1] is not thread:
            if thread in threads:
                threads.remove(thread)
            threads.append(thread)
            del threads[:-_FEW]
        _note(thread, prompt, start, anchor.rewritten if anchor is not None else 0)
        return thread.talk.key

    def _landed(self, prompt: Prompt, landing: Landing, start: int) -> Thread | None:
        """The prompt agrees with all that its leaf holds, or ends inside it."""
        anchor, threads = landing.anchor, landing.leaf.threads
        if not threads:
            return None
        found, reach, again = None, 0, False
        for thread in reversed(threads):
            if _restarts(thread, prompt, landing.shared):
                again = True
                continue
            at = _reach(thread, prompt)
            if at and len(prompt) <= thread.last + _SLACK and self._over(thread, anchor):
                continue  # the same prompt again, after a long time
            if at == 0 and thread.last - _SLACK <= landing.shared <= start + self._forest.tail:
                at = landing.shared  # short enough that the tree holds all of it
            if at > reach:
                found, reach = thread, at
        if found is None and again:
            return None
        if anchor is None:
            return found
        if found is not None:
            anchor.follows += 1
            return found
        anchor.breaks += 1
        found = _quoted(threads, prompt, anchor)
        if found is None:
            self._forest.deepen(landing.leaf, prompt, anchor)
            if not _appends(anchor) and not self._over(threads[-1], anchor):
                return threads[-1]
        return found

    def _over(self, thread: Thread, anchor: Node | None) -> bool:
        """Whether the thread was silent for so long that only a prompt that goes on from it belongs to it."""
        return anchor is not None and self._calls - thread.called > _OVER + _OVER_PACES * anchor.pace

    def _branched(self, prompt: Prompt, landing: Landing, start: int) -> Thread | None:
        """The prompt left the known tree after `shared` tokens, beside the sibling's threads."""
        at, sibling = landing.shared, landing.sibling
        if sibling is None or at <= start:
            return None
        for thread in reversed(sibling.threads):
            if _restarts(thread, prompt, at):
                continue
            if _reach(thread, prompt):
                return thread
            rest = thread.last - at
            enough = at - start >= max(8, (thread.last - start) / 2)
            over = self._over(thread, landing.anchor)
            if enough and (rest <= _SLACK or (len(prompt) - at <= _SLACK and not over)):
                return thread
            if landing.anchor is not None and thread.calls == 1 and rest > 0 and _moved(sibling, prompt, at, rest):
                landing.anchor.rewritten = rest
                return thread
        if landing.anchor is not None and at - start >= 8:
            return _quoted(sibling.threads, prompt, landing.anchor)
        return None

    # ---- other agents' threads of the same talk ----

    def _link(self, thread: Thread, prompt: Prompt, namespace: str, anchor: Node, agent: int) -> None:
        tail = self._forest.tail
        known = len(thread.head) if thread.node is anchor else 0
        end = len(prompt) - anchor.rewritten
        if known < min(tail, end - anchor.end):
            ids = prompt.ids(anchor.end, min(end, anchor.end + tail))
            thread.node, thread.head = anchor, np.array(ids, dtype=np.uint64)
            runs = _runs(thread.head)
            if not any(other is not thread for other in thread.talk.threads.values()):
                talk = self._search(thread, prompt, namespace, agent, runs)
                if talk is not None:
                    thread.talk = talk
            for at, run in runs:
                self._file(namespace, run, thread, at)
        thread.talk.threads[agent] = thread

    def _search(
        self, thread: Thread, prompt: Prompt, namespace: str, agent: int, runs: list[tuple[int, int]]
    ) -> Talk | None:
        best, reach = None, -1
        tried: list[Talk] = [thread.talk]
        for at, run in runs:
            for other, other_at in reversed(self._runs.get((namespace, run), ())):
                talk = other.talk
                if talk in tried or talk.threads.get(agent, thread) is not thread or other.node is None:
                    continue
                shift = at - other_at
                if not _same_words(thread.head, other.head, at, shift):
                    continue
                tried.append(talk)
                got = _reach(other, prompt, anchor_shift(thread, other) + shift)
                if got == 0 and other.marks and _appends(other.node):
                    continue  # the other went on differently: the same task, another session
                if got > reach:
                    best, reach = talk, got
        return best

    def _file(self, namespace: str, run: int, thread: Thread, at: int) -> None:
        key = (namespace, run)
        filed = self._runs.get(key)
        if filed is None:
            self._runs[key] = [(thread, at)]
            if len(self._runs) > self._cap:
                self._runs.popitem(last=False)
            return
        self._runs.move_to_end(key)
        if all(other.talk is not thread.talk for other, _ in filed):
            filed.append((thread, at))
            del filed[:-_FEW]


def anchor_shift(thread: Thread, other: Thread) -> int:
    """How much later the thread's head starts in its prompt than the other's does in its own, in tokens."""
    assert thread.node is not None and other.node is not None
    return thread.node.end - other.node.end


def _appends(anchor: Node) -> bool:
    """Whether the agent's prompts are known to continue earlier ones."""
    return anchor.follows >= 4 and anchor.breaks <= anchor.follows


def _reach(thread: Thread, prompt: Prompt, shift: int = 0) -> int:
    """Tokens up to which the prompt repeats the thread's latest one, shifted; 0 when it does so nowhere."""
    for end, mark in thread.marks:
        end += shift
        if _MARK <= end <= len(prompt) and prompt.ids(end - _MARK, end).tobytes() == mark:
            return end
    return 0


def _restarts(thread: Thread, prompt: Prompt, shared: int) -> bool:
    """The prompt is the thread's first one again, although the thread went on."""
    n = len(prompt)
    if thread.last <= thread.first + 2 * _SLACK or abs(n - thread.first) > _SLACK:
        return False
    if thread.first_mark is None:
        return shared >= n - _SLACK
    end, mark = thread.first_mark
    return end <= n and prompt.ids(end - _MARK, end).tobytes() == mark


def _moved(sibling: Node, prompt: Prompt, at: int, rest: int) -> bool:
    """What the sibling's prompt held after position `at` now ends this prompt: text was put in before it."""
    assert sibling.edge is not None
    start = len(prompt) - rest
    if sibling.end - len(sibling.edge) != at or start <= at:
        return False
    end = sibling.edge.slice(0, min(rest, len(sibling.edge)))
    return len(end) >= 12 and prompt.agree(end, start) == len(end)


def _quoted(threads: list[Thread], prompt: Prompt, anchor: Node) -> Thread | None:
    """The latest thread whose last prompt's end stands anywhere in this one: text was put in or left out before it."""
    low = max(anchor.end, len(prompt) - _SEARCH)
    text = b""
    for thread in reversed(threads):
        if not thread.marks or (thread.node is not None and thread.node is not anchor):
            continue
        end, mark = thread.marks[0]
        text = text or prompt.ids(low, len(prompt)).tobytes()
        at = text.find(mark)
        while at >= 0 and at % 8:
            at = text.find(mark, at + 1)
        # as far from the end as it was: an end that all the agent's prompts have
        if at >= 0 and len(prompt) - (low + at // 8 + _MARK) != thread.last - end:
            return thread
    return None


def _note(thread: Thread, prompt: Prompt, start: int, rewritten: int) -> None:
    n = len(prompt)
    ends = [n - rewritten - back for back in MARKS if n - rewritten - back - _MARK >= start]
    thread.marks = tuple((end, prompt.ids(end - _MARK, end).tobytes()) for end in ends)
    if thread.calls == 0:
        thread.first = n
        thread.first_mark = thread.marks[0] if thread.marks else None
    thread.calls += 1
    thread.last = n


def _runs(head: np.ndarray) -> list[tuple[int, int]]:
    """(position, hash) of the first run of 8 tokens and of every eighth other, chosen by their hashes."""
    if len(head) < _GRAM:
        return []
    mixed = np.convolve(head, _POWERS, "valid")
    mixed ^= mixed >> _SHIFT
    mixed *= _FACTOR
    chosen = [0, *np.flatnonzero(mixed[1:] >> _TOP == 0).tolist()]
    chosen[1:] = [at + 1 for at in chosen[1:]]
    return list(zip(chosen, mixed[chosen].tolist()))


def _same_words(mine: np.ndarray, theirs: np.ndarray, at: int, shift: int) -> bool:
    """Whether two heads agree around position `at`, theirs moved by `shift`, over half of the shorter one or more."""
    low, high = max(0, shift), min(len(mine), len(theirs) + shift)
    differ = np.flatnonzero(mine[low:high] != theirs[low - shift : high - shift]) + low
    after = int(np.searchsorted(differ, at))
    first = int(differ[after - 1]) + 1 if after else low
    last = int(differ[after]) if after < len(differ) else high
    return last - first >= max(_GRAM, min(len(mine), len(theirs)) // 2)
