"""Real SGLang servers on this CPU for tests; each start takes 20 to 60 s, so share them where a test allows it."""

import contextlib
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import tiny_model as model_maker
from launch.server import Server

# Tests that import SGLang into this process need it as much as the servers do.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "out" / "test-logs"

StartServer = Callable[..., Server]
Post = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny model, made once per version of its generator."""
    return model_maker.cached(ROOT / "out" / "models")


def _starter(stack: contextlib.ExitStack, model: Path, log_name: str) -> StartServer:
    def start(policy: str | None = None, **options: Any) -> Server:
        number = len(list(LOGS.glob(f"{log_name}*.log"))) if LOGS.is_dir() else 0
        options.setdefault("log_path", LOGS / f"{log_name}-{number}.log")
        # SGLang's scheduler polls without pause: two idle servers would take both cores from every other test
        options["extra_args"] = [*options.get("extra_args", ()), "--sleep-on-idle"]
        return stack.enter_context(Server(options.pop("model_path", model), policy, **options))

    return start


@pytest.fixture
def start_server(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[StartServer]:
    """``start_server(policy, **options of launch.server.Server)``: a running server, stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield _starter(stack, tiny_model, request.node.name.replace("/", "-"))


@pytest.fixture(scope="session")
def lru_server(tiny_model: Path) -> Iterator[Server]:
    """One stock LRU server with room for 16,384 tokens, shared by all tests; flush its cache before relying on it."""
    with contextlib.ExitStack() as stack:
        yield _starter(stack, tiny_model, "lru")("lru", max_total_tokens=16384)


@pytest.fixture(scope="session")
def post() -> Post:
    """``post(url, path, **body)``: the JSON answer of a POST; raises on any status but 200."""

    def send(url: str, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else {"text": text.decode()}

    return send


@pytest.fixture(scope="session")
def generate(post: Post) -> Callable[..., dict[str, Any]]:
    """``generate(url, token ids, new tokens, **sampling)``: the answer of /generate, greedy unless told otherwise."""

    def send(url: str, prompt: list[int], tokens: int = 16, **sampling: Any) -> dict[str, Any]:
        parameters = {"temperature": 0, "max_new_tokens": tokens} | sampling
        return post(url, "/generate", input_ids=prompt, sampling_params=parameters)

    return send
