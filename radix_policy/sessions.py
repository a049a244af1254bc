"""Live sessions: where each one stands. State is capped; the session idle for longest is dropped first."""

from collections import OrderedDict
from collections.abc import Callable

from radix_policy.nodes import UNKNOWN


class Session:
    """One session: the task of one user, a sequence of agent calls."""

    __slots__ = (
        "agent",
        "calls",
        "ended",
        "entry",
        "finished_at",
        "id",
        "key",
        "namespace",
        "running",
        "state",
        "visits",
    )

    def __init__(self, session_id: int, namespace: str, key: str) -> None:
        self.id = session_id  # never used twice
        self.namespace = namespace
        self.key = key
        self.agent = UNKNOWN  # agent of the latest call
        self.entry = UNKNOWN  # agent of the first call
        self.calls = 0
        self.running = 0  # calls in the engine now
        self.finished_at = 0.0  # seconds on the shared clock when the latest call finished
        self.ended = False
        self.visits: dict[int, int] = {}  # calls by agent
        self.state: object = None  # for the eviction policy alone


class SessionTable:
    """Sessions by (namespace, key) and by id, at most `cap` of them."""

    def __init__(self, cap: int, on_drop: Callable[[Session], None] | None = None) -> None:
        self.cap = cap
        self.dropped = 0
        self._on_drop = on_drop
        self._next_id = 0
        self._by_key: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._by_id: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self):  # type: ignore[no-untyped-def]
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
        return session

    def _drop_oldest(self) -> None:
        _, session = self._by_key.popitem(last=False)
        del self._by_id[session.id]
        self.dropped += 1
        if self._on_drop is not None:
            self._on_drop(session)
