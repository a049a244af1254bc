"""A running SGLang server: started, waited for, and always stopped."""

import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from launch import guard
from launch.command import HOST, Command, build, free_port

STOP_GRACE_S = 15.0
_POLL_S = 0.2
# An exception's own line at the end of a traceback, or argparse's complaint.
_ERROR = re.compile(r"^(\[[^\]]*\] )?((\w+\.)*\w*(Error|Exception|Exit)\b(:|$)|[\w./ -]+: error: |cannot start )")
# Consequences of another process's failure and noise that every start has; the cause is elsewhere in the log.
_NOT_THE_CAUSE = re.compile(r"Ignore import error|died during|EOFError|BrokenPipeError|ConnectionResetError|is dead")


class ServerError(RuntimeError):
    """A server that did not start: one line with the reason; ``exit_code`` is the server's (None if it hung)."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def error_line(lines: Iterable[str]) -> str:
    """The line of a log that best says why a server died: its last exception that is not a mere consequence."""
    nonblank = [line.strip() for line in lines if line.strip()]
    candidates = [line for line in nonblank if _ERROR.match(line)]
    causes = [line for line in candidates if not _NOT_THE_CAUSE.search(line)]
    return (causes or candidates or nonblank or ["no output"])[-1]


class Process:
    """A command under :mod:`launch.guard`: whatever happens to this process, nothing of the command stays behind.

    ``output`` None: the command shares this process's stdout and stderr. ``on_line``: called with each line of output
    (text, from a thread of its own) instead. ``log_path``: output goes to this file instead.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        log_path: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        grace_s: float = STOP_GRACE_S,
    ) -> None:
        self.grace_s = grace_s
        guarded = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(grace_s), "--", *argv]
        sink: int | IO[bytes] | None = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            sink = log_path.open("wb")
        elif on_line is not None:
            sink = subprocess.PIPE
        try:
            self.popen = subprocess.Popen(
                guarded,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=None if sink is None else subprocess.STDOUT,
                # Its own session: Ctrl-C reaches the launcher only, which then stops the server in an orderly way.
                start_new_session=True,
            )
        finally:
            if not isinstance(sink, int) and sink is not None:
                sink.close()
        self._reader: threading.Thread | None = None
        if on_line is not None and self.popen.stdout is not None:
            self._reader = threading.Thread(target=self._read, args=(self.popen.stdout, on_line), daemon=True)
            self._reader.start()

    @staticmethod
    def _read(stream: IO[bytes], on_line: Callable[[str], None]) -> None:
        for raw in stream:
            on_line(raw.decode(errors="replace"))

    @property
    def pid(self) -> int:
        """Pid of the command itself (of the guard, should the command be gone)."""
        found = guard.descendants(self.popen.pid)
        return found[0] if found else self.popen.pid

    def pids(self) -> list[int]:
        """All living processes of the command, without the guard."""
        return guard.descendants(self.popen.pid)

    def poll(self) -> int | None:
        return self.popen.poll()

    def send(self, number: int) -> None:
        """Forward a signal (SIGTERM, SIGINT or SIGHUP); the guard kills what has not stopped after the grace time."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def wait(self) -> int:
        """Wait until the command and all that it started are gone; returns its exit code (128 + n for signal n)."""
        code = self.popen.wait()
        if self._reader is not None:
            self._reader.join(timeout=5)
        return code if code >= 0 else 128 - code

    def stop(self) -> int:
        """SIGTERM, SIGKILL to everything after the grace time; returns the exit code. Safe to call twice."""
        self.send(signal.SIGTERM)
        try:
            self.popen.wait(self.grace_s + 10)
        except subprocess.TimeoutExpired:
            # Only a guard that is stopped or stuck gets here; its death takes the command with it.
            self.popen.kill()
        return self.wait()


def is_ready(url: str, timeout_s: float = 5.0) -> bool:
    """Whether a server answers /health with 200, or asks for a key (it is up then: SGLang opens the port last)."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except (OSError, ValueError):
        return False


class Server:
    """An SGLang server for the length of a ``with`` block.

    ``max_total_tokens`` is the size of the KV pool in tokens, ``env`` is added to this process's environment,
    ``port`` None takes a free one, ``log_path`` None keeps the log in a temporary file that goes with the server.
    Entering raises :class:`launch.command.UsageError` or :class:`ServerError`; leaving stops the server and all its
    processes.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        policy: str | None = None,
        *,
        policy_config: str | None = None,
        max_total_tokens: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        host: str = HOST,
        port: int | None = None,
        cpu: bool | None = None,
        start_timeout_s: float = 300.0,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self.start_timeout_s = start_timeout_s
        self.stop_grace_s = stop_grace_s
        self.start_seconds = float("nan")
        self._env = {**os.environ, **(env or {})}
        arguments = ["--model-path", os.fspath(model_path), "--host", host, "--port", str(port or free_port(host))]
        if max_total_tokens is not None:
            arguments += ["--max-total-tokens", str(max_total_tokens)]
        self.command: Command = build(
            [*arguments, *extra_args], policy=policy, policy_config=policy_config, cpu=cpu, env=self._env
        )
        self._own_log = log_path is None
        self.log_path = Path(log_path) if log_path is not None else Path()
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def pid(self) -> int:
        """Pid of SGLang's main process; raises RuntimeError when the server is not running."""
        return self._running().pid

    @property
    def pids(self) -> list[int]:
        """Pids of all of the server's processes."""
        return self._running().pids()

    def scheduler_cpu_s(self) -> float | None:
        """CPU seconds, user and system, that SGLang's scheduler processes have used; None where /proc names none."""
        ticks, found = 0, False
        for pid in self.pids:
            try:
                if b"sglang::scheduler" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
                # the name in parentheses may hold anything; 12th and 13th after the last ")": user and system time
                times = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[11:13]
            except OSError:
                continue
            ticks += sum(map(int, times))
            found = True
        return ticks / os.sysconf("SC_CLK_TCK") if found else None

    def _running(self) -> Process:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        try:
            with self.log_path.open(encoding="utf-8", errors="replace") as file:
                return "".join(collections.deque(file, lines))
        except OSError:
            return ""

    def start(self) -> "Server":
        """Start and wait until requests are served; ``start_seconds`` is how long that took."""
        if self._own_log:
            descriptor, name = tempfile.mkstemp(prefix="sglang-server-", suffix=".log")
            os.close(descriptor)
            self.log_path = Path(name)
        begin = time.monotonic()
        self._process = Process(
            self.command.argv, self._env | self.command.env, log_path=self.log_path, grace_s=self.stop_grace_s
        )
        try:
            while not is_ready(self.url):
                code = self._process.poll()
                if code is not None:
                    raise ServerError(
                        f"the server exited with code {self._process.wait()} before it was ready: "
                        f"{error_line(self.log_tail(400).splitlines())}",
                        self._process.wait(),
                    )
                if time.monotonic() - begin > self.start_timeout_s:
                    raise ServerError(
                        f"the server was not ready after {self.start_timeout_s:.0f} s: "
                        f"{error_line(self.log_tail(400).splitlines())}"
                    )
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begin
        return self

    def stop(self) -> int | None:
        """Stop the server and everything it started; returns its exit code, None if it was not running."""
        process, self._process = self._process, None
        if process is None:
            return None
        code = process.stop()
        if self._own_log:
            self.log_path.unlink(missing_ok=True)
        return code

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
