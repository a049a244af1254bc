"""Traffic that warmup learns from, the moment when a slice runs, and what must hold once all is quiet."""

import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from launch.server import Server
from tests.server.test_policy_server import prompt
from tests.server.test_policy_server import states as states_of

Generate = Callable[..., dict[str, Any]]
Post = Callable[..., dict[str, Any]]
Call = tuple[list[int], dict[str, Any], float]  # prompt, tag, seconds before it

POOL = 900  # tokens; the pipeline's anchors alone take more
ANCHOR = 300
AGENTS = 4
VERIFY = {"SGLANG_SCOUT_VERIFY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
CONFIG = '{"warmup": true}'
EAGER = '{"warmup": true, "warmup_p_min": 0.01, "warmup_share": 0, "warmup_slice": %d}'  # many slices, come what may

_SLICE = re.compile(r"sglang-scout: warmup (\d+): tokens")  # with --log-level debug


def pipeline(
    sessions: int, turns: int = 8, pause: float = 1.0, anchor: int = ANCHOR, agents: int = AGENTS, name: str = "s"
) -> list[Call]:
    """Sessions one after the other, agents in turn; every session but the last says where it ends."""
    anchors = [prompt(anchor, 100 + agent) for agent in range(agents)]
    calls = []
    for session in range(sessions):
        said = prompt(60, 1000 + session)
        for turn in range(turns):
            agent = turn % agents
            tag = {"agent": f"agent{agent}", "session": f"{name}{session}", "final": turn == turns - 1}
            calls.append((anchors[agent] + said, tag, pause))
            said = said + prompt(20, 5000 + 100 * session + turn)
    return calls


def waiting(calls: list[Call]) -> list[Call]:
    """The same, but the last session goes on, so that its next agent is waited for."""
    tokens, tag, pause = calls[-1]
    return [*calls[:-1], (tokens, {**tag, "final": False}, pause)]


def play(server: Server, generate: Generate, calls: list[Call], tokens: int = 4) -> list[Any]:
    answers = []
    for text, tag, pause in calls:
        time.sleep(pause)
        answers.append(generate(server.url, text, tokens, ignore_eos=True, custom_params={"scout": tag}))
    return answers


def say(server: Server, post: Post, call: Call, tokens: int = 4, **body: Any) -> dict[str, Any]:
    """One call at once; `body`: what else /generate is told."""
    text, tag, _ = call
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {"scout": tag}}
    return post(server.url, "/generate", input_ids=text, sampling_params=sampling, **body)


def flush(server: Server) -> None:
    """Empty the cache, as soon as nothing runs. Nothing is warmed then until somebody calls."""
    urllib.request.urlopen(server.url + "/flush_cache?timeout=30", timeout=60).close()


def log_of(server: Server) -> str:
    return server.log_path.read_text(errors="replace")


def slices(server: Server) -> int:
    """How many slices were sent so far."""
    return len(_SLICE.findall(log_of(server)))


def await_slice(server: Server, since: int, seconds: float = 20) -> None:
    """Return as soon as a slice is on its way that the log says after so many bytes; the server logs at level debug."""
    with server.log_path.open(errors="replace") as log:
        log.seek(since)
        seen, deadline = "", time.monotonic() + seconds
        while _SLICE.search(seen) is None:
            assert time.monotonic() < deadline, "no warmup"
            time.sleep(0.002)
            seen = seen[-200:] + log.read()


def provoke(server: Server, generate: Generate) -> None:
    """Empty the cache and call agent 0 in a session that says it will call agent 1: return once that one is warmed."""
    flush(server)
    since = server.log_path.stat().st_size
    tag = {"agent": "agent0", "session": f"provoked{since}", "next": "agent1"}
    generate(server.url, prompt(40, since), 1, custom_params={"scout": tag})
    await_slice(server, since)


def state_of(server: Server) -> dict[str, Any]:
    (state,) = states_of(server)
    return state


def settled(server: Server) -> list[dict[str, Any]]:
    """The states once no request and no slice is in the engine."""
    deadline = time.monotonic() + 30
    while True:
        time.sleep(0.3)
        states = states_of(server)
        busy = [s["counters"]["in_flight"] + s["warmup"]["in_flight"] for s in states]
        if not any(busy) or time.monotonic() > deadline:
            return states


def assert_all_sound(server: Server) -> list[dict[str, Any]]:
    """Every rank: no fault, no leak, nothing lost."""
    states = settled(server)
    for state in states:
        assert state["live"] and state["faults"] == {} and state["unhooked"] == []
        assert state["mirror"]["differences"] == []
        warmup, counts = state["warmup"], state["counters"]
        assert warmup["on"] and warmup["in_flight"] == warmup["delayed"] == 0
        assert warmup["issued"] == warmup["finished"] + warmup["aborted"]
        assert counts["in_flight"] == 0 and counts["requests"] == counts["finished"] + counts["aborted"]
    log = log_of(server)
    for trouble in (
        "leak detected",
        "Scheduler hit an exception",
        "sglang-scout: fault",
        "Sanity check FAILED",
        "state was deleted in TokenizerManager",
    ):
        assert trouble not in log
    return states


def assert_sound(server: Server) -> dict[str, Any]:
    (state,) = assert_all_sound(server)
    return state


def await_wait(server: Server, kind: str, since: int = 0, seconds: float = 10) -> None:
    """Return once a control request of this kind, sent after the log had so many characters, waits for a slice."""
    deadline = time.monotonic() + seconds
    while f"sglang-scout: {kind} waits for a warmup" not in log_of(server)[since:]:
        assert time.monotonic() < deadline, f"no {kind} waited for a warmup"
        time.sleep(0.05)
