"""Which requests may write their new KV to the host tier: working-set admission (EfficientAgent, section 4).

    u = floor(n / b) - floor(h / b)        chunks of the prompt that would be written
    decline when  u > kappa  and the tier is under pressure

n tokens of prompt, h of them in a prefix whose nodes all have a host copy. A tier of C tokens below the working set W
(what is used between two calls of a session) loses what it was given before it is read. A request of many new chunks,
a refill of what was lost or a new context, then costs others more than it can win; one of a few keeps a resident
context whole. Above the working set writing less only loses. Pressure by mode:

    none         never: everything is written (what SGLang does)
    fixed        always
    conditioned  used >= theta * C, the tier evicts, and W > C with W = (A - 1) * mean prompt, A the sessions that
                 called in the last WINDOW seconds (as published)
    measured     used + n - h > theta * C, the tier evicts, W > MARGIN * C, and no room: resident + n > C. W is what
                 the sessions that called between two calls of one session hold, averaged over returns; resident is
                 what those hold whose last call could write. Sessions that have ended count for nothing in either.
                 So it is load control: as many contexts stay as fit, and the next gets in when one of them ends

Decided once per request, when its prompt is first looked up, from what every tensor-parallel rank sees the same. A
request whose session is unknown is never declined by `measured` unless sessions are known that fill the tier.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from radix_policy.config import key

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World

MODES = ("none", "fixed", "conditioned", "measured")
WINDOW = 60.0  # seconds in which a session must have called to count in A; EfficientAgent's default
PROMPTS = 256  # prompts whose mean is taken; EfficientAgent's default
CHUNKS_PER_PROMPT = 32  # of a mean prompt, where b is not given: the paper's 33K tokens in chunks of 1,024
EVICTING = 64  # requests for which the tier counts as evicting after it last did
MARGIN = 0.8  # of the tier; W is an average: some returns are longer, and W still grows when a pool has just begun
_WEIGHT = 1 / 16  # of the latest return in the measured working set


@dataclass(frozen=True)
class AdmissionConfig:
    """Keys of host-tier admission."""

    admission: str = key("measured", "which requests may write to the host tier of HiCache", choices=MODES)
    admission_chunk: int = key(
        0, "b, tokens per chunk in the admission rule; 0: a 32nd of the mean prompt", low=0, high=1 << 20, unit="tokens"
    )
    admission_kappa: int = key(8, "most new chunks that are written under pressure", low=0, high=1 << 20, unit="chunks")
    admission_theta: float = key(
        0.95, "share of the host tier that is full, or would be, under pressure", low=0, high=1
    )


def published_working_set(live_sessions: int, mean_prompt: float) -> float:
    """(A - 1) * mean prompt, tokens: what may be used between two calls of a session (EfficientAgent, section 4)."""
    return max(live_sessions - 1, 0) * mean_prompt


class Tier(NamedTuple):
    """The host tier when a decision is made."""

    capacity: int  # tokens
    used: int  # tokens
    evicted: int  # tokens dropped since the start


class _Context:
    """What a session held at its last call."""

    __slots__ = ("resident", "seconds", "tokens")

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self.resident = False  # it could write


class Admission:
    """Decides, and learns the working set. State: a few numbers per session, and PROMPTS prompt lengths."""

    def __init__(self, world: "World", config: AdmissionConfig, page_size: int = 1) -> None:
        self.world = world
        self.config = config
        self.page = page_size
        self.asked = 0
        self.declined = 0
        self.returns = 0  # calls of a session that had called before
        self.reuse_distance = 0.0  # tokens: W as measured
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._sum = 0
        self._contexts: OrderedDict[int, _Context] = OrderedDict()  # by session, the one that called last at the end
        self._evicted = 0  # tokens, when last asked
        self._evicted_at = -EVICTING  # request

    def admits(
        self, request: "Request | None", prompt_tokens: int, host_tokens: int, tier: Tier, may_decline: bool = True
    ) -> bool:
        """Whether the request may write what it computes. Call it once per request, at its first lookup.

        With `may_decline` false it may, and what it tells is learned.
        """
        self.asked += 1
        if self.config.admission == "none":
            return True
        if tier.evicted > self._evicted:
            self._evicted, self._evicted_at = tier.evicted, self.asked
        own = self._learn(request, prompt_tokens)
        b = self.chunk
        few = prompt_tokens // b - host_tokens // b <= self.config.admission_kappa
        admitted = few or not may_decline or not self._is_pressed(own, prompt_tokens, host_tokens, tier)
        if own is not None:
            own.resident = admitted
        self.declined += not admitted
        return admitted

    @property
    def chunk(self) -> int:
        """b, in tokens: whole pages."""
        b = self.config.admission_chunk or int(self.mean_prompt / CHUNKS_PER_PROMPT)
        return max(b - b % self.page, self.page)

    @property
    def mean_prompt(self) -> float:
        """Tokens, over the last PROMPTS requests; 0 before the first."""
        return self._sum / len(self._prompts) if self._prompts else 0.0

    @property
    def sessions(self) -> int:
        """A: sessions that called within WINDOW seconds."""
        now, found = self.world.clock.seconds, 0
        for context in reversed(self._contexts.values()):
            if now - context.seconds > WINDOW:
                break
            found += 1
        return found

    @property
    def working_set(self) -> float:
        """W in tokens, as the mode has it; 0 under `none`, which learns nothing."""
        if self.config.admission == "measured":
            return self.reuse_distance
        return published_working_set(self.sessions, self.mean_prompt)

    def snapshot(self) -> dict[str, Any]:
        """Counters and the working set, JSON-ready."""
        return {
            "mode": self.config.admission,
            "asked": self.asked,
            "declined": self.declined,
            "chunk_tokens": self.chunk,
            "mean_prompt_tokens": round(self.mean_prompt, 1),
            "sessions": self.sessions,
            "working_set_tokens": round(self.working_set),
            "reuse_distance_tokens": round(self.reuse_distance),
        }

    # ---- inside ----

    def _is_pressed(self, own: _Context | None, n: int, h: int, tier: Tier) -> bool:
        mode, full = self.config.admission, self.config.admission_theta * tier.capacity
        if mode == "fixed":
            return True
        if self.asked - self._evicted_at >= EVICTING:
            return False
        if mode == "conditioned":
            return tier.used >= full and self.working_set > tier.capacity
        if tier.used + n - h <= full or self.reuse_distance <= MARGIN * tier.capacity:
            return False
        return self._resident(own) + n > tier.capacity

    def _resident(self, own: _Context | None) -> int:
        """Tokens of the other live sessions whose last call could write."""
        live = self.world.sessions.live
        return sum(c.tokens for s, c in self._contexts.items() if c.resident and c is not own and s in live)

    def _learn(self, request: "Request | None", prompt_tokens: int) -> _Context | None:
        if len(self._prompts) == PROMPTS:
            self._sum -= self._prompts[0]
        self._prompts.append(prompt_tokens)
        self._sum += prompt_tokens
        session = request.session if request is not None else None
        if session is None:
            return None
        contexts, seconds = self._contexts, self.world.clock.seconds
        own = contexts.get(session.id)
        if own is None:
            own = contexts[session.id] = _Context(prompt_tokens, seconds)
            while len(contexts) > self.world.sessions.cap:
                contexts.popitem(last=False)
            return own
        self.returns += 1
        self.reuse_distance += max(_WEIGHT, 1 / self.returns) * (self._called_since(own) - self.reuse_distance)
        own.tokens, own.seconds = prompt_tokens, seconds
        contexts.move_to_end(session.id)
        return own

    def _called_since(self, own: _Context) -> int:
        """Tokens of the live sessions that called after that one last did."""
        live, tokens = self.world.sessions.live, 0
        for other, context in reversed(self._contexts.items()):
            if context is own:
                break
            if other in live:
                tokens += context.tokens
        return tokens
