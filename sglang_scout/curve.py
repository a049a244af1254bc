"""The sampled stack-distance curve of a running server, for `sglang-scout plan --url`."""

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from radix_policy.config import key
from radix_policy.events import Prompt
from radix_policy.prompts import TokenPrompt
from radix_policy.sampled_curve import SampledCurve


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """What `plan --url` is planned from."""

    # On by default: once per request 0.15 ms for 2,000 tokens and 0.5 ms for 100,000, and 3 MB in all, on two shared
    # cores (`python -m benchmarks.curve_cost`); prefill of as many tokens takes a hundred times as long and more.
    curve: bool = key(True, "keep a sampled stack-distance curve of the requests, for `sglang-scout plan --url`")
    curve_chunk: int = key(
        16, "tokens per chunk of a prompt that is sampled or not; at least a page", low=1, high=4096, unit="tokens"
    )
    curve_samples: int = key(
        16384, "chunks that the sample holds at most; the share that is sampled falls as it fills", low=64, high=10**5
    )
    curve_depth: int = key(
        1 << 24,
        "size of cache up to which the curve is known; prompts that were not used for longer are forgotten",
        low=4096,
        high=10**12,
        unit="tokens",
    )


class OnlineCurve:
    """Told which requests run. What a request writes is met, and not found, in the prompt that continues it."""

    def __init__(self, config: CurveConfig, page_size: int) -> None:
        chunk = -(-max(config.curve_chunk, page_size) // page_size) * page_size  # a cache finds whole pages
        self._curve = SampledCurve(chunk, config.curve_samples, max(config.curve_depth, chunk))

    def clear(self) -> None:
        """The cache was flushed: begin anew."""
        self._curve.clear()

    def started(self, rid: str, prompt: Prompt, namespace: str) -> None:
        """A request was looked up to run; its tokens are only read."""
        if isinstance(prompt, TokenPrompt):
            tokens = prompt.tokens
            whole = isinstance(tokens, array) and tokens.typecode == "q"
            ids = np.frombuffer(tokens, dtype=np.int64) if whole else np.array(tokens, dtype=np.int64)  # type: ignore[call-overload]
            self._curve.start(rid, ids, namespace)

    def finished(self, rid: str) -> None:
        """A request left the engine, whether it ever ran or not."""
        if self._curve.is_running(rid):
            self._curve.finish(rid)

    def snapshot(self) -> dict[str, Any]:
        """`SampledCounts.to_json`."""
        return self._curve.counts().to_json()
