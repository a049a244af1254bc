"""What the README says is what the code does. `python tests/unit/test_readme.py` rewrites the table of keys."""

import re
import sys
from pathlib import Path

from radix_policy.admission import AdmissionConfig
from radix_policy.config import markdown
from radix_policy.eviction import POLICIES
from radix_policy.identity import IdentityConfig
from radix_policy.runtime import RuntimeConfig
from radix_policy.warmup import WarmupConfig
from sglang_scout.curve import CurveConfig

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- keys -->\n).*?(<!-- /keys -->)", re.DOTALL)
PARTS = {
    "scout": POLICIES["scout"].Config,
    "cachescout": POLICIES["cachescout"].Config,
    "both: identity": IdentityConfig,
    "both: runtime": RuntimeConfig,
    "both: host tier": AdmissionConfig,
    "both: curve": CurveConfig,
    "both: warmup": WarmupConfig,
}


def expected(text: str) -> str:
    return TABLE.sub(lambda found: f"{found[1]}{markdown(PARTS)}\n{found[2]}", text)


def test_every_key_is_in_the_table_with_its_default_and_effect() -> None:
    text = README.read_text()
    assert TABLE.search(text) and text == expected(text), "run: python tests/unit/test_readme.py"


def test_files_that_are_linked_are_there() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / link).exists(), f"{name} links to {link}"


def test_the_two_commands_are_named_and_ci_runs_one() -> None:
    text = README.read_text()
    assert "./run demo" in text and "./run test" in text
    assert "./run test" in (ROOT / ".ci" / "run").read_text()


if __name__ == "__main__":
    README.write_text(expected(README.read_text()))
    sys.exit(0)
