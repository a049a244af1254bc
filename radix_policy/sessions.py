"""Live sessions: where each one stands, and when it is over.

A session is over when its client says so, or when it stays silent for longer than `limit` (seconds, set by the
runtime from the gaps seen). A call of a session that was taken for ended revives it, and what its END had taught is
taken back. State is capped; the session called longest ago is dropped first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from radix_policy.ends import EndMark
from radix_policy.lengths import UNKNOWN_LENGTH
from radix_policy.nodes import UNKNOWN


class Session:
    """One session: the task of one user, a sequence of agent calls."""

    __slots__ = (
        "agent",
        "calls",
        "end_mark",
        "ended",
        "entry",
        "finished_at",
        "id",
        "key",
        "length_kind",
        "namespace",
        "next_agent",
        "running",
        "started_at",
        "state",
        "trail",
        "visits",
    )

    def __init__(self, session_id: int, namespace: str, key: str) -> None:
        self.id = session_id  # never used twice
        self.namespace = namespace
        self.key = key
        self.agent = UNKNOWN  # agent of the latest call
        self.entry = UNKNOWN  # agent of the first call
        self.trail: tuple[int, int] = (UNKNOWN, UNKNOWN)  # agents of the two calls before the latest, older first
        self.calls = 0
        self.running = 0  # calls in the engine now
        self.started_at = 0.0  # seconds on the shared clock when the latest call arrived
        self.finished_at = 0.0  # seconds on the shared clock when the latest call finished
        self.length_kind = UNKNOWN_LENGTH  # of the latest call's output, once it finished
        self.ended = False
        self.end_mark: EndMark | None = None  # how the END was counted
        self.next_agent = UNKNOWN  # the client's forecast of the next agent
        self.visits: dict[int, int] = {}  # calls by agent
        self.state: object = None  # for the eviction policy alone


class SessionTable:
    """Sessions by (namespace, key) and by id, at most `cap` of them."""

    def __init__(self, cap: int, on_drop: Callable[[Session], None] | None = None) -> None:
        self.cap = cap
        self.dropped = 0
        self.live: dict[int, Session] = {}  # not ended, in the order in which they were opened or revived
        self._idle: OrderedDict[int, Session] = OrderedDict()  # of those, not running, silent for longest first
        self.on_drop = on_drop
        self._next_id = 0
        self._by_key: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._by_id: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        """Sessions from the one called longest ago to the latest."""
        return iter(self._by_key.values())

    def get(self, session_id: int) -> Session | None:
        """The session with that id, or None when it is unknown or was dropped."""
        return self._by_id.get(session_id)

    def find(self, namespace: str, key: str) -> Session | None:
        """The session with that key, or None."""
        return self._by_key.get((namespace, key))

    def open(self, namespace: str, key: str) -> Session:
        """The session with that key, made when new, and now the most recent one."""
        session = self._by_key.get((namespace, key))
        if session is not None:
            self._by_key.move_to_end((namespace, key))
            return session
        if len(self._by_key) >= self.cap:
            self._drop_oldest()
        session = Session(self._next_id, namespace, key)
        self._next_id += 1
        self._by_key[namespace, key] = session
        self._by_id[session.id] = session
        self.live[session.id] = session
        return session

    # ---- the life of a session ----

    def called(self, session: Session, agent: int, seconds: float) -> None:
        """A call of the session arrived."""
        if session.calls == 0:
            session.entry = agent
        else:
            session.trail = (session.trail[1], session.agent)
        session.agent = agent
        session.calls += 1
        session.running += 1
        session.length_kind = UNKNOWN_LENGTH
        session.started_at = seconds
        visits = session.visits
        visits[agent] = visits.get(agent, 0) + 1
        self._idle.pop(session.id, None)

    def finished(self, session: Session, seconds: float, length: int | None = None) -> None:
        """A call of the session left the engine; `length`: the kind of its output if it was the latest call."""
        left = session.running - 1
        session.running = left if left > 0 else 0
        if length is not None:
            session.length_kind = length
        if seconds > session.finished_at:
            session.finished_at = seconds
        if left <= 0 and not session.ended and session.id in self._by_id:
            self._idle[session.id] = session  # at the end: its call had taken it out

    def end(self, session: Session) -> None:
        """The session is over."""
        session.ended = True
        self.live.pop(session.id, None)
        self._idle.pop(session.id, None)

    def revive(self, session: Session) -> None:
        """It was not over."""
        session.ended = False
        session.end_mark = None
        self.live[session.id] = session

    def silent_since(self, seconds: float) -> list[Session]:
        """Sessions whose last call finished before `seconds` and that run nothing now."""
        found = []
        for session in self._idle.values():
            if session.finished_at >= seconds:
                break
            found.append(session)
        return found

    def _drop_oldest(self) -> None:
        _, session = self._by_key.popitem(last=False)
        del self._by_id[session.id]
        self.live.pop(session.id, None)
        self._idle.pop(session.id, None)
        self.dropped += 1
        if self.on_drop is not None:
            self.on_drop(session)
