"""Live workloads: scripted sessions as token ids, and a six-agent travel desk as text."""

from benchmarks.agents.live import LiveCall, LiveSession, OutOfTurn, ScriptedSession, live_sessions
from benchmarks.agents.text import TextSession, TextWorkload

__all__ = ["LiveCall", "LiveSession", "OutOfTurn", "ScriptedSession", "TextSession", "TextWorkload", "live_sessions"]
