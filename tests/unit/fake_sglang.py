"""An HTTP server that answers as SGLang's does, with a toy model and a toy prefix cache: for tests of clients."""

import asyncio
import contextlib
import hashlib
import json
import threading
from array import array
from types import TracebackType
from typing import Any, Self

from aiohttp import web


class FakeSglang:
    """Serves on a free port of 127.0.0.1 in a thread while the `with` block runs.

    `keep`: sequences that the cache holds, the oldest is dropped; 0: nothing is ever cached. `longest`: prompts above
    it are refused as SGLang refuses them. `delay_s`: seconds per call. `die_after`: calls until the connection breaks.
    `salt` makes another model of it.
    """

    def __init__(
        self,
        *,
        policy: str = "lru",
        capacity: int = 4096,
        keep: int = 100,
        longest: int = 10**9,
        delay_s: float = 0.0,
        die_after: int | None = None,
        incremental: bool = False,
        salt: int = 0,
        scout: dict[str, Any] | None = None,
        api_key: str | None = None,
        model_path: str = "/models/toy",
        port: int = 0,
    ) -> None:
        self.policy, self.capacity, self.keep, self.longest = policy, capacity, keep, longest
        self.delay_s, self.die_after, self.incremental, self.salt = delay_s, die_after, incremental, salt
        self.scout, self.api_key, self.model_path, self.port = scout, api_key, model_path, port
        self.requests: list[dict[str, Any]] = []  # bodies of /generate, warm-up included
        self.flushes = 0
        self.most_at_once = 0
        self._running = 0
        self._cache: list[list[int]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The bodies since the last flush."""
        return self.requests[self._flushed_at :]

    def __enter__(self) -> Self:
        self._flushed_at = 0
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it stops by itself after `die_after`
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/health", self._health)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        state = {} if self.scout is None else {"scout": self.scout}
        return web.json_response(
            {
                "version": "0.0-fake",
                "radix_eviction_policy": self.policy,
                "radix_eviction_policy_config": None,
                "max_total_num_tokens": self.capacity,
                "max_req_input_len": self.longest,
                "page_size": 1,
                "model_path": self.model_path,
                "incremental_streaming_output": self.incremental,
                "launch_command": "--fake",
                "internal_states": [state],
            }
        )

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        self._cache.clear()
        self._flushed_at = len(self.requests)
        return web.Response(text="Cache flushed.")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await self._answer(request, body)
        finally:
            self._running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.die_after is not None and len(self.requests) > self.die_after:
            assert request.transport is not None
            request.transport.abort()
            self._stop.set()
            return response
        await asyncio.sleep(self.delay_s)
        if len(prompt) > self.longest:
            message = f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({self.longest} tokens)."
            await _send(response, {"error": {"message": message, "code": 400}})
        else:
            hit = max((_common(prompt, known) for known in self._cache), default=0)
            hit = min(hit, len(prompt) - 1)
            output = self._output(prompt, new)
            meta = {
                "prompt_tokens": len(prompt),
                "cached_tokens": hit,
                "cached_tokens_details": {"device": hit, "host": 0},
                "finish_reason": None,
            }
            for n in range(1, new + 1):
                ids = output[n - 1 : n] if self.incremental else output[:n]
                reason = {"type": "length"} if n == new else None
                await _send(response, {"text": "x", "output_ids": ids, "meta_info": {**meta, "finish_reason": reason}})
            if self.keep:
                self._cache = [*self._cache, prompt + output][-self.keep :]
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _output(self, prompt: list[int], new: int) -> list[int]:
        seed = hashlib.blake2b(array("q", [self.salt, *prompt]).tobytes(), digest_size=8).digest()
        return [20 + int.from_bytes(hashlib.blake2b(seed + bytes([n % 256])).digest()[:2]) % 900 for n in range(new)]


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
