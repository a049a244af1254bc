"""What a slice is to SGLang: a request like any other, in the namespace of the clients whose anchor it is."""

import functools
from typing import Any, NamedTuple

from radix_policy.events import Prompt
from sglang_scout.scheduler import ClockTick

WORK = (
    "TokenizedGenerateReqInput",
    "TokenizedEmbeddingReqInput",
    "BatchTokenizedGenerateReqInput",
    "BatchTokenizedEmbeddingReqInput",
    "AbortReq",
)


class Space(NamedTuple):
    """The namespace of an anchor as SGLang has it."""

    extra_key: str | None  # the client's
    cache_salt: str | None
    lora_id: str | None
    whole_key: str | None  # Req.extra_key: the client's with the LoRA's id behind it


def make_request(rid: str, prompt: Prompt, space: Space) -> Any:
    """The prefill of a prompt, with no token generated."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=0, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=prompt.ids(0, len(prompt)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        lora_id=space.lora_id,
        extra_key=space.extra_key,
        cache_salt=space.cache_salt,
        no_logs=True,
    )


def is_work(item: Any) -> bool:
    """Whether a client's request is one to be run, or an abort; everything else may want an idle server."""
    return isinstance(item, _work_types())


@functools.cache
def _work_types() -> tuple[type, ...]:
    from sglang.srt.managers import io_struct

    return (*(getattr(io_struct, name) for name in WORK), ClockTick)
