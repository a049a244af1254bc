"""Headers that say who is calling, turned into tags in the HTTP process. Off unless SGLANG_SCOUT_HEADERS is set.

    SGLANG_SCOUT_HEADERS=default        the headers of known clients (DEFAULT below)
    SGLANG_SCOUT_HEADERS='{"agent": "x-agent", "session": ["x-session-id", "x-task"]}'

An ASGI middleware puts the tag into the JSON body, as if the client had sent `custom_params.scout` itself: at the top
level for /v1/chat/completions and /v1/completions, in `sampling_params` for /generate. /v1/responses takes no
custom_params, so there it is the top-level `session_id`. What the body says already wins. A body that is not a JSON
object, is compressed or is larger than MAX_BODY passes through untouched.

/v1/messages (Claude Code) drops unknown fields; there the tag travels in a context variable to SGLang's conversion
into a chat request. Nothing else here knows SGLang.
"""

import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from radix_policy.config import ConfigError
from radix_policy.identity import MAX_NAME
from sglang_scout import config

logger = logging.getLogger(__name__)

ENV = "SGLANG_SCOUT_HEADERS"
MAX_BODY = 32 * 2**20  # bytes of a body that is read before the request goes on

# The first header present counts. Claude Code's agent id names one sub-agent at work, not its role: what several calls
# of it have in common is a session of their own beside the main one, and the agent is learned from its prompt.
DEFAULT: Mapping[str, tuple[str, ...]] = {
    "session": (
        "x-claude-code-session-id",
        "x-dynamo-session-id",
        "x-opencode-session",
        "x-session-id",
        "x-session-affinity",
        "session-id",  # Codex
        "session_id",  # Codex, older
    ),
    "branch": ("x-claude-code-agent-id",),
    "final": ("x-dynamo-session-final",),
}
KEYS = ("agent", "session", "branch", "next", "final")

_CHAT, _GENERATE, _RESPONSES, _MESSAGES = "chat", "generate", "responses", "messages"
_PATHS = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _CHAT,
    "/generate": _GENERATE,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
}
_CONVERSION = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request"
_AUTH = (
    "sglang.srt.utils.auth.add_api_key_middleware",
    "sglang.srt.utils.auth.app_has_admin_force_endpoints",
)

Tag = dict[str, Any]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_current: ContextVar[Tag | None] = ContextVar("sglang_scout_tag", default=None)


@dataclass(frozen=True)
class HeaderMap:
    """Which headers make which key of a tag; names in lower case, the first one present counts."""

    agent: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    branch: tuple[str, ...] = ()  # with a session: appended to it, since its calls run beside the session's others
    next: tuple[str, ...] = ()
    final: tuple[str, ...] = ()

    def tag(self, headers: Iterable[tuple[bytes, bytes]]) -> Tag:
        """The tag that the headers make; empty when there is none. Values that no tag may hold are left out."""
        found: dict[str, str] = {}
        for name, value in headers:
            found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip())
        values = {key: _first(getattr(self, key), found) for key in KEYS}
        tag: Tag = {key: values[key] for key in ("agent", "session", "next") if values[key] is not None}
        if values["session"] is not None and values["branch"] is not None:
            joined = f"{values['session']}/{values['branch']}"
            if len(joined) <= MAX_NAME:
                tag["session"] = joined
        if values["final"] is not None and values["final"].lower() in ("1", "true", "yes"):
            tag["final"] = True
        return tag


def _first(names: tuple[str, ...], found: Mapping[str, str]) -> str | None:
    for name in names:
        value = found.get(name, "")
        if 0 < len(value) <= MAX_NAME and value.isascii() and value.isprintable():
            return value
    return None


def header_map(text: str) -> HeaderMap | None:
    """The mapping that the environment variable asks for; None when it is off. ConfigError in one line."""
    if text.strip().lower() in ("", "0", "false", "no", "off"):
        return None
    if text.strip().lower() in ("1", "true", "yes", "on", "default"):
        return HeaderMap(**DEFAULT)
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{ENV}: got {text!r}, allowed: default, off, or a JSON object with keys {', '.join(KEYS)}")
    names: dict[str, tuple[str, ...]] = {}
    for key, value in given.items():
        if key not in KEYS:
            raise ConfigError(f"{ENV}: unknown key {key!r}; known keys: {', '.join(KEYS)}")
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(name, str) and name.strip() for name in listed):
            raise ConfigError(f"{ENV}: key {key!r}: got {value!r}, allowed: a header's name or a list of them")
        names[key] = tuple(name.strip().lower() for name in listed)
    return HeaderMap(**names)


class HeaderTags:
    """The middleware. Requests without a mapped header, and all but POST to the known paths, pass as they are."""

    def __init__(self, app: App, headers: HeaderMap) -> None:
        self.app = app
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        kind = _PATHS.get(scope.get("path", "")) if scope["type"] == "http" and scope["method"] == "POST" else None
        tag = self.headers.tag(scope["headers"]) if kind is not None else {}
        if kind is None or not tag:
            await self.app(scope, receive, send)
        elif kind == _MESSAGES:
            token = _current.set(tag)
            try:
                await self.app(scope, receive, send)
            finally:
                _current.reset(token)
        elif _plain(scope):
            scope, receive = await _rewritten(scope, receive, kind, tag)
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _plain(scope: Scope) -> bool:
    """Whether the body is JSON as it stands and not known to be too large."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            return False
        if name == b"content-length" and (not value.isdigit() or int(value) > MAX_BODY):
            return False
    return True


async def _rewritten(scope: Scope, receive: Receive, kind: str, tag: Tag) -> tuple[Scope, Receive]:
    """Read the body and put the tag in; the scope and the `receive` with which the request goes on."""
    messages: list[Message] = []
    size = 0
    whole = False
    while not whole and size <= MAX_BODY:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            break
        size += len(message.get("body", b""))
        whole = not message.get("more_body", False)
    if whole:
        body = b"".join(message.get("body", b"") for message in messages)
        new = with_tag(body, kind, tag)
        if new is not None:
            messages = [{"type": "http.request", "body": new, "more_body": False}]
            kept = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            scope = {**scope, "headers": [*kept, (b"content-length", str(len(new)).encode())]}

    async def replay() -> Message:
        return messages.pop(0) if messages else await receive()

    return scope, replay


def with_tag(body: bytes, kind: str, tag: Tag) -> bytes | None:
    """The body with the tag in it; None where it has to stay as it is."""
    try:
        document = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    if document.get("session_id") is not None:
        tag = {key: value for key, value in tag.items() if key != "session"}
    if kind == _RESPONSES:
        if "session" not in tag:
            return None
        if "session_id" in document:  # null: a second key in front would lose to it
            return _encoded({**document, "session_id": tag["session"]})
        return _opened(body, {"session_id": tag["session"]})
    if not tag:
        return None
    if kind == _CHAT:
        if "custom_params" not in document:
            return _opened(body, {"custom_params": {"scout": tag}})
        return _encoded(document) if _merged(document, tag) else None
    params = document.get("sampling_params")
    if params is None:
        params = document["sampling_params"] = {}
    each = params if isinstance(params, list) else [params]
    changed = [_merged(one, tag) for one in each if isinstance(one, dict)]
    return _encoded(document) if any(changed) else None


def _opened(body: bytes, first: Mapping[str, Any]) -> bytes:
    """The JSON object with more keys in front, every other byte as it was."""
    at = body.index(b"{") + 1
    comma = b"" if body[at:].lstrip()[:1] == b"}" else b","
    return body[:at] + json.dumps(first)[1:-1].encode() + comma + body[at:]


def _encoded(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _merged(holder: dict[str, Any], tag: Tag) -> bool:
    """Put the tag into the holder's custom_params, where its own tag says nothing; whether anything changed."""
    params = holder.get("custom_params")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        return False
    own = params.get("scout")
    if own is None:
        own = {}
    if not isinstance(own, dict):
        return False
    new = {**tag, **{key: value for key, value in own.items() if value is not None}}
    if new == own:
        return False
    holder["custom_params"] = {**params, "scout": new}
    return True


# ---- the seam ----


def attach(app: Any, text: str | None = None) -> bool:
    """Add the middleware to a FastAPI or Starlette app that is not running yet, once; whether it is there.

    `text` instead of the environment variable.
    """
    if config.disabled():
        return False
    headers = header_map(os.environ.get(ENV, "") if text is None else text)
    if headers is None:
        return False
    if all(known.cls is not HeaderTags for known in app.user_middleware):
        app.add_middleware(HeaderTags, headers=headers)
    return True


def register_hooks() -> None:
    """Have SGLang's HTTP process call `attach`: for `plugin.load`. Nothing is hooked while the variable is unset.

    A value that cannot be meant ends the process at its start, in one line: SGLang only logs what plug-ins raise.
    """
    try:
        if config.disabled() or header_map(os.environ.get(ENV, "")) is None:
            return
    except ConfigError as error:
        print(f"sglang-scout: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # one of the two is called at the start, with the app, depending on whether there are API keys
    for target in _AUTH:
        if all(known is not _before_auth for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, _before_auth, HookType.BEFORE)


def _before_auth(app: Any, *args: Any, **kwargs: Any) -> None:
    try:
        if attach(app):
            _tag_messages()
    except Exception:
        logger.exception("headers are not turned into tags")


def _tag_messages() -> None:
    """Hand tags on in SGLang's conversion of /v1/messages; now, since its module is heavy and loaded here only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if all(known is not _after_conversion for _, known, _ in HookRegistry._hooks.get(_CONVERSION, ())):
        HookRegistry.register(_CONVERSION, _after_conversion, HookType.AFTER)
        HookRegistry.apply_hooks()


def _after_conversion(result: Any, *args: Any, **kwargs: Any) -> None:
    tag = _current.get()
    if tag is not None:
        params = {"custom_params": getattr(result, "custom_params", None)}
        if _merged(params, tag):
            result.custom_params = params["custom_params"]
