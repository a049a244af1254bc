"""Streaming client of SGLang's native `/generate`: token ids in and out, times from the client's own clock."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0  # without a byte from the server; a long prefill on a CPU sends nothing for a while
_WARM_UP_TOKENS = 96  # shorter than any fingerprint window, so that a warm-up never becomes an agent


class ServerGone(RuntimeError):
    """The server cannot be reached, or answers what SGLang does not; one line."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself that a result must carry."""

    version: str
    policy: str
    policy_config: Any
    capacity_tokens: int  # device KV pool
    page_size: int
    longest_prompt: int | None  # tokens; None when the server does not tell
    model_path: str
    incremental: bool  # streamed chunks are deltas
    command: str
    scout: tuple[Mapping[str, Any], ...] = ()  # the plug-in's snapshot, one per data parallel rank

    def record(self) -> dict[str, Any]:
        """The part that goes into a result file."""
        return {
            "sglang": self.version,
            "policy": self.policy,
            "policy_config": self.policy_config,
            "capacity_tokens": self.capacity_tokens,
            "page_size": self.page_size,
            "command": self.command,
        }


@dataclass(frozen=True)
class Reply:
    """One answered call. `refused` holds the server's reason when it would not run the request."""

    output_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0  # the engine's own counter
    cached_device: int | None = None
    cached_host: int | None = None
    ttft_s: float = 0.0  # from sending to the first streamed token
    latency_s: float = 0.0  # from sending to the end of the stream
    refused: str | None = None


@dataclass
class Client:
    """One server. Use as `async with Client(url) as client`."""

    url: str
    api_key: str | None = None
    silence_timeout_s: float = SILENCE_TIMEOUT_S
    incremental: bool = False
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self.silence_timeout_s, connect=None
        )
        # No limit: a slot must never wait for another slot's connection, that would count as the server's time.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3600)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self) -> ServerInfo:
        """The server's own description; ServerGone when nothing, or something else than SGLang, answers."""
        data = await self._json("/server_info")
        try:
            capacity = int(data["max_total_num_tokens"])
            states = data.get("internal_states") or []
            info = ServerInfo(
                version=str(data.get("version", "unknown")),
                policy=str(data.get("radix_eviction_policy") or "lru"),
                policy_config=_object(data.get("radix_eviction_policy_config")),
                capacity_tokens=capacity,
                page_size=int(data.get("page_size") or 1),
                longest_prompt=int(data["max_req_input_len"]) if data.get("max_req_input_len") else None,
                model_path=str(data.get("model_path", "")),
                incremental=bool(data.get("incremental_streaming_output")),
                command=_command(data.get("launch_command")),
                scout=tuple(s["scout"] for s in states if isinstance(s, Mapping) and "scout" in s),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerGone(f"{self.url} answers, but not as an SGLang server does ({error!r})") from error
        self.incremental = info.incremental
        return info

    async def flush(self) -> None:
        """Empty the cache; waits for requests that still run. ServerGone when the server will not."""
        async with self._call("POST", "/flush_cache?timeout=30") as response:
            if response.status != 200:
                raise ServerGone(f"{self.url}/flush_cache: {(await response.text()).strip()[:200]}")

    async def warm_up(self, requests: int = 2, vocabulary: int = 256) -> None:
        """Run a few small requests, then empty the cache: first-call costs are no part of a measurement."""
        for n in range(requests):
            prompt = [(7 * i + n) % (vocabulary - 8) + 8 for i in range(_WARM_UP_TOKENS)]
            await self.generate(prompt, max_new_tokens=4)
        await self.flush()

    async def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        tag: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Reply:
        """Run one greedy call of exactly `max_new_tokens` tokens and wait for its end."""
        sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        if tag:
            sampling["custom_params"] = {"scout": dict(tag)}
        body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True}
        if session_id is not None:
            body["session_id"] = session_id
        payload = json.dumps(body, separators=(",", ":")).encode()
        start = time.perf_counter()
        async with self._call("POST", "/generate", payload) as response:
            if response.status != 200:
                return Reply(refused=_reason(await response.text(), response.status), latency_s=_since(start))
            return await self._read_stream(response, start)

    async def _read_stream(self, response: aiohttp.ClientResponse, start: float) -> Reply:
        first: float | None = None
        last = b""
        deltas: list[int] = []
        buffer = bytearray()
        try:
            async for part in response.content.iter_any():
                now = time.perf_counter()
                buffer += part
                while (end := buffer.find(b"\n\n")) >= 0:
                    event = bytes(buffer[:end]).strip()
                    del buffer[: end + 2]
                    if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
                        continue
                    last = event[5:]
                    # Chunks are cumulative: parsing each would cost the square of the output's length, on the cores
                    # that the server computes on. Only deltas must all be read.
                    if first is None:
                        chunk = json.loads(last)
                        if chunk.get("output_ids"):
                            first = now
                    if self.incremental:
                        deltas += json.loads(last).get("output_ids") or []
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerGone(f"{self.url}: {_plain(error)}") from error
        latency = _since(start)
        try:
            final = json.loads(last) if last else {}
        except json.JSONDecodeError as error:
            raise ServerGone(f"{self.url}: the stream ended in the middle of a chunk") from error
        return _reply(final, deltas if self.incremental else None, start, first, latency)

    def _call(self, method: str, path: str, payload: bytes | None = None) -> "_Call":
        if self._session is None:
            raise RuntimeError("the client is not open")
        headers = {"Content-Type": "application/json"} if payload is not None else None
        return _Call(self.url, self._session.request(method, self.url + path, data=payload, headers=headers))

    async def _json(self, path: str) -> dict[str, Any]:
        async with self._call("GET", path) as response:
            if response.status != 200:
                raise ServerGone(f"{self.url}{path} answers {response.status} {response.reason}")
            try:
                data = json.loads(await response.text())
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ServerGone(f"{self.url}{path} does not answer with JSON") from error
        if not isinstance(data, dict):
            raise ServerGone(f"{self.url}{path} does not answer as an SGLang server does")
        return data


class _Call:
    """A request whose connection errors become ServerGone, one line each."""

    def __init__(self, url: str, request: Any) -> None:
        self._url = url
        self._request = request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
        except aiohttp.InvalidURL as error:
            raise ServerGone(f"{self._url} is not a URL such as http://127.0.0.1:30000") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerGone(f"{self._url}: {_plain(error)}") from error
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._request.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | asyncio.TimeoutError | ConnectionError):
            raise ServerGone(f"{self._url}: {_plain(error)}") from error


def _reply(
    final: Mapping[str, Any], deltas: list[int] | None, start: float, first: float | None, latency: float
) -> Reply:
    if "error" in final:
        error = final["error"]
        message = error.get("message", error) if isinstance(error, Mapping) else error
        return Reply(refused=_one_line(str(message)), latency_s=latency)
    meta = final.get("meta_info") or {}
    reason = meta.get("finish_reason") or {}
    if isinstance(reason, Mapping) and reason.get("type") == "abort":
        return Reply(refused=_one_line(str(reason.get("message", "aborted"))), latency_s=latency)
    output = tuple(deltas if deltas is not None else final.get("output_ids") or ())
    if first is None or not output:
        return Reply(refused="the server ended the stream without a token", latency_s=latency)
    details = meta.get("cached_tokens_details") or {}
    return Reply(
        output_ids=output,
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        cached_device=details.get("device"),
        cached_host=details.get("host"),
        ttft_s=first - start,
        latency_s=latency,
    )


def _since(start: float) -> float:
    return time.perf_counter() - start


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _reason(text: str, status: int) -> str:
    try:
        data = json.loads(text)
        error = data.get("error", data)
        text = str(error.get("message", error) if isinstance(error, Mapping) else error)
    except (json.JSONDecodeError, AttributeError):
        pass
    return _one_line(text) or f"HTTP {status}"


def _plain(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({(error.os_error.strerror or str(error.os_error)).lower()})"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return "the server closed the connection in the middle of an answer"
    return _one_line(str(error)) or type(error).__name__


def _object(value: Any) -> Any:
    """A configuration as an object, whether the server tells it as one or as JSON text; none when it is empty."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return value or None


def _command(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "")
