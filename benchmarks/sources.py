"""What is replayed: a generated workload, a recorded trace or the text agents, as live sessions of token ids."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import traces
from benchmarks.agents import LiveSession, TextWorkload, live_sessions
from benchmarks.results import UsageError, check_sessions, whole
from radix_policy.workloads import Call, SessionScript, Workload, WorkloadError, make

# Token ids that every model has, whatever its vocabulary: the same requests then go to any server.
VOCABULARY, RESERVED = 2000, 16
MAX_CONCURRENCY = 1024
TAGS = frozenset({"agent", "session", "session_id", "final"})
TEXT = "text:"  # prefix of the workloads that need a tokenizer


@dataclass(frozen=True)
class Source:
    """The sessions of one workload or trace."""

    label: dict[str, str]  # {"workload": name} or {"trace": file name}
    open: Callable[[], Sequence[LiveSession]]  # every session, fresh, in the order in which slots take them
    sessions: int
    calls: int
    largest: int  # F: tokens of the largest single request
    agents: tuple[str, ...] = ()
    transitions: Sequence[Sequence[float]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    lanes: int = (
        1  # above 1 there is background traffic in slots of its own, and the order of requests depends on times
    )

    @property
    def name(self) -> str:
        """The workload's name or the trace's file name."""
        return next(iter(self.label.values()))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is replayed."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", metavar="W", help="pipeline, selector, random:large, text:selector, ...")
    what.add_argument("--trace", metavar="FILE", help="recorded trace (JSON lines, may be gzip)")
    parser.add_argument(
        "--tokenizer", metavar="M", help=f"model whose tokenizer {TEXT}... uses (default: the server's)"
    )
    parser.add_argument("--sessions", type=int, metavar="K", help="only the first K sessions")
    parser.add_argument(
        "--max-calls", type=int, metavar="M", help="only the first M calls (the last session may be cut)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload and of times that a trace lacks")
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="factor on think and tool times (0: none)"
    )
    parser.add_argument(
        "--tags",
        default="agent,session",
        help="what requests say: of agent, session, session_id, final; or none (default: agent,session)",
    )


def check_options(args: argparse.Namespace) -> None:
    """UsageError on a number out of range."""
    check_sessions(args.sessions)
    if args.max_calls is not None and args.max_calls < 1:
        raise UsageError(f"--max-calls must be at least 1, not {args.max_calls}")
    check_time_scale(args.time_scale)


def check_time_scale(factor: float) -> None:
    """UsageError when `--time-scale` is out of range."""
    if not 0 <= factor <= 1000:
        raise UsageError(f"--time-scale must be in [0, 1000], not {factor:g}")


def parse_tags(text: str) -> frozenset[str]:
    """The kinds of tags in `--tags`."""
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    if kinds == {"none"}:
        return frozenset()
    unknown = kinds - TAGS
    if unknown or not kinds:
        raise UsageError(f"--tags: {', '.join(sorted(TAGS))} or none, not {text!r}")
    return kinds


def parse_concurrency(text: str, option: str = "--concurrency") -> list[int]:
    """Whole numbers of slots, separated by commas."""
    found = [whole(part) or 0 for part in text.split(",")]
    if min(found) < 1 or max(found) > MAX_CONCURRENCY:
        raise UsageError(f"{option}: whole numbers in 1..{MAX_CONCURRENCY}, separated by commas, not {text!r}")
    return list(dict.fromkeys(found))


def needs_tokenizer(args: argparse.Namespace) -> bool:
    """Whether `load` wants the folder of a tokenizer."""
    return bool(args.workload and args.workload.startswith(TEXT))


def load(args: argparse.Namespace, concurrency: int, tokenizer: str | None = None) -> Source:
    """The source that the options name; UsageError or WorkloadError in one line.

    `tokenizer`: folder or name of the model whose tokenizer and chat template the text agents use.
    """
    check_options(args)
    if args.trace is not None:
        traces.distinct([args.trace])
        workload = traces.read(args.trace, seed=args.seed, max_sessions=args.sessions, max_calls=args.max_calls)
        return from_workload(workload, {"trace": Path(args.trace).name})
    if needs_tokenizer(args):
        text = TextWorkload(
            args.workload.removeprefix(TEXT),
            seed=args.seed,
            concurrency=concurrency,
            sessions=args.sessions,
            tokenizer=_tokenizer(tokenizer),
        )
        text.script = cut_calls(text.script, args.max_calls)
        return from_text(text)
    workload = make(args.workload, seed=args.seed, concurrency=concurrency, sessions=args.sessions)
    return from_workload(cut_calls(workload, args.max_calls), {"workload": workload.name})


def _tokenizer(path: str | None) -> Any:
    if not path:
        raise UsageError(f"--workload {TEXT}... needs the model's tokenizer: give --tokenizer")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import PreTrainedTokenizerFast

    try:
        # Not AutoTokenizer: it imports the model's configuration class, and with it torchvision, which a machine
        # without a GPU cannot always import.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # whatever a file that is no tokenizer makes the library raise
        raise UsageError(f"tokenizer {path}: {' '.join(str(error).split())[:200]}") from None
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"tokenizer {path}: has no chat template, which --workload {TEXT}... needs")
    return tokenizer


def from_text(text: TextWorkload) -> Source:
    """The sessions of the text agents; sizes come from playing them once with outputs of the asked-for length."""
    sizes = []
    for session in text.sessions():
        while (call := session.next_call()) is not None:
            sizes.append((len(call.input_ids or ()), call.max_new_tokens))
            session.feed([0] * call.max_new_tokens)
    facts = {
        **{k: v for k, v in text.script.facts.items() if k in ("R", "R_spec", "mean_turns")},
        "prompt_tokens": sum(p for p, _ in sizes),
        "output_tokens": sum(o for _, o in sizes),
        "anchor_tokens": text.anchor_tokens(),
    }
    return Source(
        label={"workload": text.name},
        open=text.sessions,
        sessions=len(text.script.sessions),
        calls=len(sizes),
        largest=max(p + o for p, o in sizes),
        agents=text.agents,
        transitions=text.script.transitions,
        facts=facts,
    )


def from_workload(workload: Workload, label: dict[str, str]) -> Source:
    """The sessions of a workload; WorkloadError when there is none."""
    if not workload.sessions:
        raise WorkloadError(f"{workload.name}: no sessions")
    return Source(
        label=label,
        open=lambda: live_sessions(workload, VOCABULARY, RESERVED),
        sessions=len(workload.sessions),
        calls=workload.requests,
        largest=workload.largest,
        agents=workload.agents,
        transitions=workload.transitions,
        facts=dict(workload.facts),
        lanes=len(workload.lanes),
    )


def cut_calls(workload: Workload, limit: int | None) -> Workload:
    """Only the first `limit` calls, in the order of sessions."""
    if limit is None:
        return workload
    kept: list[SessionScript] = []
    for script in workload.sessions:
        calls: tuple[Call, ...] = script.calls[:limit]
        limit -= len(calls)
        if calls:
            kept.append(replace(script, calls=calls))
    return replace(workload, sessions=tuple(kept))


def parse_capacities(text: str, largest: int) -> tuple[int, ...]:
    """Those of `--max-total-tokens`, separated by commas, each once."""
    return tuple(dict.fromkeys(parse_capacity(word, largest) for word in text.split(",")))


def parse_capacity(text: str, largest: int, option: str = "--max-total-tokens") -> int:
    """Tokens from `4096` or, in units of the largest single request, `2F` or `1.15F`."""
    word = text.strip()
    try:
        tokens = round(float(word[:-1]) * largest) if word[-1:] in ("F", "f") else int(word)
    except (ValueError, OverflowError):
        tokens = 0
    if not 0 < tokens < 2**31:
        raise UsageError(f"{option}: tokens such as 8192, or 2F for twice the largest request, not {text!r}")
    return tokens
