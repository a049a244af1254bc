"""Small random workloads that do everything that is awkward: shared anchors, equal messages, forks, equal outputs."""

from hypothesis import strategies as st

from radix_policy.workloads import SessionScript, Workload, make_call

# Messages that begin alike, end alike, continue each other's ids, or are one token long
MESSAGES = ((1000, 3), (1003, 2), (1000, 5), (2000, 4), (2002, 3), (3000, 1), (3001, 6))
ANCHORS = ((10, 4), (10, 7), (50, 2))


@st.composite
def workloads(draw: st.DrawFn, sessions: int = 5, calls: int = 5) -> Workload:
    """At most `sessions` sessions of at most `calls` calls each; prompts of up to some 60 tokens."""
    scripts = []
    for number in range(draw(st.integers(1, sessions))):
        said: list[tuple[int, int]] = []
        made = []
        for _ in range(draw(st.integers(1, calls))):
            agent = draw(st.integers(0, len(ANCHORS) - 1))
            if draw(st.integers(0, 4)) == 0:
                said = said[: draw(st.integers(0, len(said)))]
            said.append(draw(st.sampled_from(MESSAGES)))
            output = draw(st.sampled_from(MESSAGES))
            gap = draw(st.sampled_from((0.0, 0.01, 0.3, 5.0)))
            made.append(make_call(f"agent{agent}", (ANCHORS[agent], *said), (output,), gap))
            said.append(output)
        scripts.append(SessionScript(f"s{number}", tuple(made)))
    return Workload("small", tuple(scripts), ("agent0", "agent1", "agent2"))
