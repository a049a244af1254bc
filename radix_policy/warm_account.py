"""What warmups were good for, and the gate that closes when they are good for too little.

A warmed stretch is tokens [begin, end) of an anchor that the device did not hold before. It is settled once:

    useful   tokens of it that the first real request to come that far found on the device
    wasted   the rest: lost before anyone came, or nobody came

The gate looks at the latest `window` settled stretches. It closes when fewer than `share` of their tokens were useful.
While it is closed one anchor per `probe` seconds is warmed, to see; it opens when the latest PROBES stretches were
useful enough again.
"""

from collections import deque
from typing import NamedTuple

from radix_policy.events import Prompt
from radix_policy.warm_anchors import Key

PROBES = 4  # settled stretches that can open the gate
OPEN_RECORDS = 8  # stretches that wait to be settled; one more settles the oldest as wasted
PATIENCE = 300.0  # seconds after which a stretch that nobody read is wasted
_EWMA = 0.1  # weight of the latest warmup in the cost of a token


class Stretch:
    """Warmed tokens that nobody has read yet."""

    __slots__ = ("at", "begin", "end", "key", "prompt")

    def __init__(self, key: Key, prompt: Prompt, begin: int, end: int, at: float) -> None:
        self.key, self.prompt, self.begin, self.end, self.at = key, prompt, begin, end, at


class Totals(NamedTuple):
    """Since the start; tokens unless said otherwise."""

    issued: int  # warmup requests
    finished: int  # of these
    aborted: int
    tokens: int  # prefilled by warmups
    useful_tokens: int
    wasted_tokens: int
    settled: int  # stretches
    useful: int  # of these, some token was useful
    seconds_saved: float  # useful tokens times the seconds that a warmup took per token
    gate_closed: int  # times


class Accounting:
    """Counts, and the gate."""

    def __init__(self, share: float, window: int, probe: float) -> None:
        """`share`: useful tokens over all below which the gate closes; `window`: stretches; `probe`: seconds."""
        self.share, self.probe = share, probe
        self.open = True
        self.issued = self.finished = self.aborted = 0
        self.tokens = self.useful_tokens = self.wasted_tokens = 0
        self.settled = self.useful = self.closings = 0
        self.seconds_saved = 0.0
        self.longest = 0.0  # seconds that a slice took at most, so that a real request waited for it
        self.waiting: list[Stretch] = []  # oldest first
        self._latest: deque[tuple[int, int]] = deque(maxlen=window)  # (tokens, useful) of settled stretches
        self._token_seconds = 0.0  # EWMA of what a prefilled token took
        self._probed = 0.0  # seconds on the clock when the gate closed, or a probe began

    # ---- the gate ----

    def may_begin(self, now: float) -> bool:
        """Whether a new anchor may be warmed at this moment."""
        return self.open or now - self._probed >= self.probe

    def begun(self, now: float) -> None:
        """A new anchor is being warmed."""
        if not self.open:
            self._probed = now

    def useful_share(self) -> float:
        """Of the tokens of the latest settled stretches; 1 while there are none."""
        tokens = sum(n for n, _ in self._latest)
        return sum(n for _, n in self._latest) / tokens if tokens else 1.0

    def _judge(self, now: float) -> None:
        enough = len(self._latest) >= (self._latest.maxlen or 1) if self.open else len(self._latest) >= PROBES
        if not enough:
            return
        good = self.useful_share() >= self.share
        if self.open and not good:
            self.open, self._probed = False, now
            self.closings += 1
            self._latest.clear()
        elif not self.open:
            if good:
                self.open = True
                self._latest.clear()
            else:
                while len(self._latest) >= PROBES:
                    self._latest.popleft()

    # ---- warmups ----

    def done(self, key: Key, prompt: Prompt, begin: int, end: int, now: float, seconds: float) -> None:
        """A warmup prefilled tokens [begin, end) of the anchor in so many seconds; `prompt` is the anchor up to `end`.

        The next slice of the same anchor goes on with the same stretch.
        """
        self.finished += 1
        self.longest = max(self.longest, seconds)
        if end <= begin:
            return
        self.tokens += end - begin
        cost = max(seconds, 0.0) / (end - begin)
        self._token_seconds += (_EWMA if self._token_seconds else 1.0) * (cost - self._token_seconds)
        last = self.waiting[-1] if self.waiting else None
        if last is not None and last.key == key and last.end == begin:
            last.prompt, last.end, last.at = prompt, end, now
            return
        self.waiting.append(Stretch(key, prompt, begin, end, now))
        if len(self.waiting) > OPEN_RECORDS:
            self._settle(self.waiting[0], 0, now)

    def read(self, namespace: str, prompt: Prompt, cached: int, now: float) -> None:
        """A real request found `cached` tokens of its prompt on the device."""
        for stretch in [s for s in self.waiting if s.key[0] == namespace]:
            agreed = prompt.agree(stretch.prompt, 0)
            if agreed > stretch.begin:
                self._settle(stretch, max(0, min(agreed, cached, stretch.end) - stretch.begin), now)

    def lost(self, key: Key, cached: int, now: float) -> None:
        """The device holds only the first `cached` tokens of the anchor."""
        for stretch in [s for s in self.waiting if s.key == key and cached < s.end]:
            if cached <= stretch.begin:
                self._settle(stretch, 0, now)
            else:  # what is left may be read yet
                self.wasted_tokens += stretch.end - cached
                stretch.end = cached

    def age(self, now: float) -> None:
        """Settle what nobody came for."""
        while self.waiting and now - self.waiting[0].at > PATIENCE:
            self._settle(self.waiting[0], 0, now)

    def forget(self) -> None:
        """The device was emptied: nobody's fault, but what was warmed is wasted."""
        self.wasted_tokens += sum(s.end - s.begin for s in self.waiting)
        self.waiting.clear()

    def _settle(self, stretch: Stretch, useful: int, now: float) -> None:
        self.waiting.remove(stretch)
        tokens = stretch.end - stretch.begin
        self.settled += 1
        self.useful += useful > 0
        self.useful_tokens += useful
        self.wasted_tokens += tokens - useful
        self.seconds_saved += useful * self._token_seconds
        self._latest.append((tokens, useful))
        self._judge(now)

    def totals(self) -> Totals:
        """The counts."""
        return Totals(
            self.issued,
            self.finished,
            self.aborted,
            self.tokens,
            self.useful_tokens,
            self.wasted_tokens,
            self.settled,
            self.useful,
            self.seconds_saved,
            self.closings,
        )
