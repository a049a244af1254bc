"""Headers of agent clients reach the scheduler of a real server as tags, on every route."""

import importlib.util
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from launch.server import Server
from sglang_scout.headers import ENV

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 4}),
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}}),
    ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 4}),
]


def send(server: Server, path: str, body: dict[str, Any], **sent: str) -> str:
    """The raw answer."""
    headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in sent.items()}}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def counters(server: Server) -> dict[str, int]:
    """The plug-in's own, once nothing is in flight."""
    for _ in range(60):
        with urllib.request.urlopen(server.url + "/server_info", timeout=60) as response:
            (state,) = [s["scout"] for s in json.load(response)["internal_states"]]
        if state["counters"]["in_flight"] == 0:
            break
        time.sleep(0.5)
    return state["counters"]


def test_headers_tag_requests_on_every_route(start_server: Callable[..., Server]) -> None:
    server = start_server("scout", max_total_tokens=2048, env={ENV: "default"})
    before = counters(server)
    with urllib.request.urlopen(server.url + "/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    for path, body in BODIES:
        body = {**body, "model": model} if "model" in body else body
        plain = send(server, path, body)
        tagged = send(server, path, body, X_Claude_Code_Session_Id="s1", X_Claude_Code_Agent_Id="a1")
        assert plain and tagged
        after = counters(server)
        assert after["requests"] == before["requests"] + 2, path
        assert after["tagged"] == before["tagged"] + 1, path
        assert after["tag_errors"] == 0
        before = after
    assert send(server, *BODIES[1], session_id="s").count("data:") > 2
