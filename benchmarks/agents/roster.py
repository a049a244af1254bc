"""The six agents of the travel desk: names, and the fixed text (the anchor) that opens each of their prompts."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TEXTS = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Agent:
    """One agent."""

    name: str
    ask: str  # how the desk asks for this agent's next message

    @property
    def key(self) -> str:
        """Name of its files."""
        return self.name.lower()

    @property
    def tools(self) -> tuple[dict[str, object], ...]:
        """JSON schemas of its tools, in the form of OpenAI's function definitions."""
        return tuple(_tools()[self.key])

    def anchor(self) -> str:
        """System prompt, tools and examples: the same text in every call of the agent."""
        schemas = "\n".join(json.dumps(tool, separators=(",", ":")) for tool in self.tools)
        return (_TEXTS / f"{self.key}.md").read_text(encoding="utf-8").replace("{tools}", schemas).strip()


@cache
def _tools() -> dict[str, list[dict[str, object]]]:
    loaded: dict[str, list[dict[str, object]]] = json.loads((_TEXTS / "tools.json").read_text(encoding="utf-8"))
    return loaded


# In the order of the generator's agents 0-5.
AGENTS = (
    Agent("Planner", "Planner, where do we stand, and who goes next?"),
    Agent("Travel", "Travel, your connections, please."),
    Agent("Hotel", "Hotel, which rooms fit?"),
    Agent("Restaurant", "Restaurant, what about the tables?"),
    Agent("Critic", "Critic, what would go wrong?"),
    Agent("Summarizer", "Summarizer, write it up for the traveller."),
)
