"""Spans to real token ids for an engine.

One fixed pseudo-random function of the span id (splitmix64's finaliser), so that the same id is the same token in every
prompt, process and run; different ids agree only by chance (1 in the vocabulary).
"""

from array import array
from collections.abc import Sequence

import numpy as np

from radix_policy.prompts import Span, span_tokens

_WORD, _GOLDEN = 1 << 64, 0x9E3779B97F4A7C15
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def materialise(spans: Sequence[Span], vocab: int, reserved: int = 0, salt: int = 0) -> "array[int]":
    """Token ids in [reserved, vocab), one for each span id; another `salt` gives an unrelated mapping.

    `reserved`: how many ids at the bottom of the vocabulary are special and must not appear.
    """
    if not 0 <= reserved < vocab:
        raise ValueError(f"reserved must be in [0, vocab): got reserved {reserved}, vocab {vocab}")
    ids = np.empty(span_tokens(spans), dtype=np.uint64)
    at = 0
    for first, count in spans:
        ids[at : at + count] = np.arange(first, first + count, dtype=np.uint64)
        at += count
    ids += np.uint64((_GOLDEN + salt * int(_MIX1)) % _WORD)
    ids ^= ids >> np.uint64(30)
    ids *= _MIX1
    ids ^= ids >> np.uint64(27)
    ids *= _MIX2
    ids ^= ids >> np.uint64(31)
    ids %= np.uint64(vocab - reserved)
    out = array("q")
    out.frombytes((ids + np.uint64(reserved)).astype(np.int64).tobytes())
    return out
