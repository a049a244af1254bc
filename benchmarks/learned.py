"""The transition matrix that a server learned, beside which a report shows the true one."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.playback import Played
from radix_policy.events import RequestArrived, RequestFinished, Tag
from radix_policy.prompts import TokenPrompt
from radix_policy.runtime import Runtime


def learned(snapshots: Sequence[Mapping[str, Any]], calls: Sequence[Played], agents: Sequence[str]) -> dict[str, Any]:
    """{"agents", "rows": P(next | agent), "predictability", "source": `server` or `recomputed`}.

    A server that does not show its counts is followed instead: the same runtime is told the same calls in the order in
    which they finished, which inside a session is the order in which they came.
    """
    for snapshot in snapshots:
        shown = snapshot.get("transitions")
        if isinstance(shown, Mapping) and shown.get("agents") and shown.get("rows"):
            return {
                "agents": [_plain(str(name)) for name in shown["agents"]],
                "rows": [[round(float(p), 6) for p in row] for row in shown["rows"]],
                "predictability": snapshot.get("predictability"),
                "source": "server",
            }
    runtime = Runtime("lru")
    prompt = TokenPrompt(())
    for number, call in enumerate(sorted(calls, key=lambda c: (c.segment, c.at))):
        rid = str(number)
        session = f"{call.session}/{call.segment}"
        runtime.observe(RequestArrived(rid, prompt, tag=Tag(call.agent or None, session)))
        runtime.observe(RequestFinished(rid, call.output))
    world = runtime.world
    names = [name for name in agents or sorted({c.agent for c in calls}) if name]
    ids = [world.identifier.agents.find("", "tag:" + name) for name in names]
    rows = []
    for source in ids:
        row = world.transitions.row(source) if source >= 0 else []
        rows.append([round(row[j], 6) if 0 <= j < len(row) else 0.0 for j in ids])
    return {
        "agents": names,
        "rows": rows,
        "predictability": round(world.transitions.predictability(), 6),
        "source": "recomputed",
    }


def _plain(name: str) -> str:
    return name.removeprefix("tag:")
