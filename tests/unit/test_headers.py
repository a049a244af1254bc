"""Headers become tags, and every other request passes as it was."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radix_policy.config import ConfigError
from radix_policy.identity import parse_tag
from sglang_scout import headers
from sglang_scout.headers import DEFAULT, HeaderMap, HeaderTags, attach, header_map, with_tag

KNOWN = HeaderMap(**DEFAULT)
CHAT = "/v1/chat/completions"


class Toy:
    """An ASGI app that keeps what it got and answers in two parts."""

    def __init__(self) -> None:
        self.body = b""
        self.parts = 0
        self.headers: dict[bytes, bytes] = {}
        self.after: Any = None
        self.tag: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = dict(scope["headers"])
        self.tag = headers._current.get()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                self.after = message
                return
            self.body += message.get("body", b"")
            self.parts += 1
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.after = await receive()
        await send({"type": "http.response.body", "body": b"two"})


def call(
    body: bytes | list[bytes],
    sent: dict[str, str],
    path: str = CHAT,
    mapping: HeaderMap = KNOWN,
    method: str = "POST",
    cut: bool = False,
) -> tuple[Toy, list[Any]]:
    """One request through the middleware; `cut`: the client leaves before its body is whole."""
    parts = body if isinstance(body, list) else [body]
    whole = b"".join(parts)
    queue = [{"type": "http.request", "body": p, "more_body": cut or i + 1 < len(parts)} for i, p in enumerate(parts)]
    queue.append({"type": "http.disconnect"})
    raw = [(k.lower().encode(), v.encode("latin-1")) for k, v in sent.items()]
    raw.append((b"content-length", str(len(whole)).encode()))
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    out: list[Any] = []

    async def receive() -> Any:
        return queue.pop(0)

    async def send(message: Any) -> None:
        out.append(message)

    toy = Toy()
    asyncio.run(HeaderTags(toy, mapping)(scope, receive, send))
    return toy, out


def test_claude_code_session_reaches_the_body_of_a_chat_request() -> None:
    body = b' {"model": "m", "messages": [{"role": "user", "content": "h\\u00e9"}], "temperature": 0.10}'
    toy, out = call(body, {"X-Claude-Code-Session-Id": "abc"})
    document = json.loads(toy.body)
    assert document.pop("custom_params") == {"scout": {"session": "abc"}}
    assert document == json.loads(body)
    assert toy.body.endswith(body[2:])  # nothing but the new key was touched
    assert toy.headers[b"content-length"] == str(len(toy.body)).encode()
    assert [m.get("body") for m in out] == [None, b"one", b"two"]  # streamed as the app wrote it
    assert toy.after == {"type": "http.disconnect"}  # the app still learns that the client left


def test_a_sub_agent_at_work_is_a_session_beside_the_main_one() -> None:
    toy, _ = call(b"{}", {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a17"})
    tag = parse_tag(json.loads(toy.body)["custom_params"])
    assert tag is not None and tag.session == "s/a17" and tag.agent is None
    toy, _ = call(b"{}", {"x-claude-code-agent-id": "a17"})
    assert toy.body == b"{}"


@pytest.mark.parametrize("name", DEFAULT["session"])
def test_sessions_of_known_clients(name: str) -> None:
    toy, _ = call(b"{}", {name: "abc"})
    assert json.loads(toy.body) == {"custom_params": {"scout": {"session": "abc"}}}


def test_all_keys_can_be_mapped() -> None:
    text = '{"agent": "X-Agent", "session": ["x-task", "x-session-id"], "next": "x-next", "final": "x-last"}'
    mapping = header_map(text)
    assert mapping is not None
    sent = {"x-agent": "coder", "x-session-id": "s", "x-next": "tester", "x-last": "TRUE"}
    toy, _ = call(b'{"a":1}', sent, mapping=mapping)
    expected = {"agent": "coder", "session": "s", "next": "tester", "final": True}
    assert json.loads(toy.body) == {"custom_params": {"scout": expected}, "a": 1}


def test_what_the_body_says_wins() -> None:
    sent = {"x-session-id": "header"}
    mapping = HeaderMap(session=("x-session-id",), agent=("x-agent",))

    def scout(body: dict[str, Any], path: str = CHAT) -> Any:
        toy, _ = call(json.dumps(body).encode(), {**sent, "x-agent": "h"}, path, mapping)
        return json.loads(toy.body)

    own = {"custom_params": {"scout": {"session": "body"}, "other": [1]}}
    assert scout(own)["custom_params"] == {"scout": {"session": "body", "agent": "h"}, "other": [1]}
    assert scout({"custom_params": {"scout": {"session": None}}})["custom_params"]["scout"]["session"] == "header"
    assert scout({"session_id": "body"})["custom_params"] == {"scout": {"agent": "h"}}
    full = {"custom_params": {"scout": {"session": "b", "agent": "b"}}}
    assert scout(full) == full
    for odd in ({"custom_params": 3}, {"custom_params": {"scout": "text"}}):
        assert scout(odd) == odd  # not ours to mend


def test_generate_takes_it_in_sampling_params() -> None:
    sent = {"x-session-id": "s"}

    def params(body: str) -> Any:
        toy, _ = call(body.encode(), sent, "/generate")
        return json.loads(toy.body)["sampling_params"]

    tag = {"custom_params": {"scout": {"session": "s"}}}
    assert params('{"text": "x"}') == tag
    assert params('{"text": "x", "sampling_params": null}') == tag
    assert params('{"text": "x", "sampling_params": {"temperature": 0}}') == {"temperature": 0, **tag}
    assert params('{"text": ["x", "y"], "sampling_params": [{"n": 1}, {}]}') == [{"n": 1, **tag}, tag]
    assert params('{"text": "x", "sampling_params": 3}') == 3


def test_responses_take_a_session_id() -> None:
    toy, _ = call(b'{"input": "x"}', {"session-id": "s"}, "/v1/responses")
    assert json.loads(toy.body) == {"session_id": "s", "input": "x"}
    toy, _ = call(b'{"session_id": "own"}', {"session-id": "s"}, "/v1/responses")
    assert toy.body == b'{"session_id": "own"}'
    toy, _ = call(b"{}", {"x-a": "a"}, "/v1/responses", HeaderMap(agent=("x-a",)))
    assert toy.body == b"{}"


def test_messages_get_it_by_context() -> None:
    class Chat:
        custom_params: Any = None

    toy, _ = call(b'{"messages": []}', {"x-claude-code-session-id": "s"}, "/v1/messages")
    assert toy.body == b'{"messages": []}' and toy.tag == {"session": "s"}
    assert headers._current.get() is None
    chat = Chat()
    headers._after_conversion(chat)
    assert chat.custom_params is None
    token = headers._current.set({"session": "s"})
    try:
        headers._after_conversion(chat)
    finally:
        headers._current.reset(token)
    assert chat.custom_params == {"scout": {"session": "s"}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"{"',
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a": 01}',
    ],
)
def test_bodies_that_are_no_json_object_pass_untouched(body: bytes) -> None:
    for path in (CHAT, "/generate", "/v1/responses"):
        toy, _ = call(body, {"x-session-id": "s"}, path)
        assert toy.body == body and toy.headers[b"content-length"] == str(len(body)).encode()


def test_other_requests_pass_untouched() -> None:
    body = b'{"a": 1}'
    assert call(body, {})[0].body == body
    assert call(body, {"x-session-id": "s"}, "/v1/models")[0].body == body
    assert call(body, {"x-session-id": "s"}, method="PUT")[0].body == body
    assert call(body, {"x-session-id": "s", "content-encoding": "gzip"})[0].body == body
    for bad in ("", "  ", "x" * 257, "\u00e9", "a\x01b"):
        assert call(body, {"x-session-id": bad})[0].body == body

    async def other() -> list[str]:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])

        for kind in ("lifespan", "websocket"):
            await HeaderTags(app, KNOWN)({"type": kind, "path": CHAT, "headers": []}, None, None)  # type: ignore[arg-type]
        return seen

    assert asyncio.run(other()) == ["lifespan", "websocket"]


def test_a_body_in_parts_and_one_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b'{"text": "', b"x" * 5000, b"", b'"}']
    toy, _ = call(parts, {"x-session-id": "s"}, "/generate")
    assert json.loads(toy.body)["text"] == "x" * 5000 and "sampling_params" in json.loads(toy.body)
    monkeypatch.setattr(headers, "MAX_BODY", 1000)
    toy, _ = call(parts, {"x-session-id": "s"}, "/generate")
    assert toy.body == b"".join(parts) and toy.parts == len(parts)
    toy, _ = call(parts[0] + parts[1] + parts[3], {"x-session-id": "s"}, "/generate")
    assert toy.body == b"".join(parts) and toy.parts == 1


def test_a_client_that_leaves_early() -> None:
    toy, out = call([b'{"text"'], {"x-session-id": "s"}, "/generate", cut=True)
    assert toy.body == b'{"text"' and toy.after == {"type": "http.disconnect"} and out == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(
        st.sampled_from(["a", "custom_params", "sampling_params", "session_id"]),
        json_values | st.fixed_dictionaries({"scout": json_values}),
    ),
    st.sampled_from(["chat", "generate", "responses"]),
    st.sampled_from([None, 1]),
)
@example({"session_id": None}, "responses", None)
@example({"custom_params": None}, "chat", None)
@example({"sampling_params": None, "session_id": None}, "generate", 1)
def test_nothing_but_the_tag_changes(document: dict[str, Any], kind: str, indent: int | None) -> None:
    new = with_tag(json.dumps(document, indent=indent).encode(), kind, {"session": "s"})
    if new is None:
        return
    after = json.loads(new)
    for key in set(document) | set(after):
        if key not in ("custom_params", "sampling_params", "session_id"):
            assert after[key] == document[key]
    if kind == "responses":
        assert after.pop("session_id") == "s"
        assert after == {k: v for k, v in document.items() if k != "session_id"}


# ---- configuration ----


def test_what_the_variable_may_hold() -> None:
    for text in ("", " ", "0", "off", "No", "false"):
        assert header_map(text) is None
    for text in ("default", "1", "ON"):
        assert header_map(text) == KNOWN
    assert header_map("{}") == HeaderMap()
    for text, word in (
        ("x-session-id", "JSON object"),
        ("[1]", "JSON object"),
        ('{"sesion": "x"}', "sesion"),
        ('{"session": 3}', "session"),
        ('{"session": [""]}', "session"),
        ('{"final": [1]}', "final"),
    ):
        with pytest.raises(ConfigError, match=word) as caught:
            header_map(text)
        assert "\n" not in str(caught.value)


class FakeApp:
    def __init__(self) -> None:
        self.user_middleware: list[Any] = []

    def add_middleware(self, cls: Any, **options: Any) -> None:
        self.user_middleware.insert(0, type("Known", (), {"cls": cls, "kwargs": options}))


def test_attach_is_off_by_default_and_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FakeApp()
    monkeypatch.delenv(headers.ENV, raising=False)
    assert not attach(app) and app.user_middleware == []
    monkeypatch.setenv(headers.ENV, "default")
    assert attach(app) and attach(app) and len(app.user_middleware) == 1
    assert app.user_middleware[0].kwargs == {"headers": KNOWN}
    monkeypatch.setenv("SGLANG_SCOUT_DISABLE", "1")
    other = FakeApp()
    assert not attach(other) and other.user_middleware == []


def test_a_value_that_cannot_be_meant_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(headers.ENV, '{"sesion": "x"}')
    with pytest.raises(SystemExit):
        headers.register_hooks()
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("SGLANG_SCOUT_DISABLE", "1")
    headers.register_hooks()


def test_a_real_app_streams_and_reads_the_tag() -> None:
    pytest.importorskip("httpx")
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    async def echo(request: Request) -> StreamingResponse:
        document = await request.json()

        async def parts() -> AsyncIterator[str]:
            for i in range(3):
                yield f"data: {i} {json.dumps(document['custom_params'])}\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    app = Starlette(routes=[Route(CHAT, echo, methods=["POST"])])
    assert attach(app, "default")
    with TestClient(app) as client, client.stream("POST", CHAT, json={"a": 1}, headers={"Session-Id": "s"}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines == [f'data: {i} {{"scout": {{"session": "s"}}}}' for i in range(3)]
