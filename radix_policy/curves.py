"""What every stack-distance curve can be asked, exact (working_set.py) or sampled (sampled_curve.py)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Curve(ABC):
    """Prompt tokens that an LRU cache finds, as a function of its size in tokens."""

    calls: int
    prompt_tokens: int

    @property
    @abstractmethod
    def reachable(self) -> int:
        """Prompt tokens that an endless cache finds."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of all that was ever used: a cache of that size loses nothing."""

    @abstractmethod
    def found(self, capacities: Sequence[int]) -> list[int]:
        """Prompt tokens found by caches of so many tokens, each at least as large as the largest call."""

    @abstractmethod
    def need(self, share: float) -> int:
        """Tokens that a cache must hold so that this share of the calls that can find anything find all they could."""

    def enough(self, gain: float = 0.01) -> int:
        """The fewest tokens of cache beyond which no more than `gain` of all prompt tokens can still be won."""
        wanted, low, high = self.reachable - gain * self.prompt_tokens, 0, self.tokens
        while low < high:
            middle = (low + high) // 2
            if self.found([middle])[0] >= wanted:
                high = middle
            else:
                low = middle + 1
        return low
