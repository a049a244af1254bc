"""``python -m launch --model-path M [--policy P] [any SGLang flag]``: one command to a running server.

Prints the exact command that it runs, waits until the server answers ("ready after N s at URL"), forwards SIGINT,
SIGTERM and SIGHUP, and exits with the server's exit code. Exit code 2, one line on stderr: what was asked for cannot
work.
"""

import argparse
import collections
import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from launch.command import UsageError, build
from launch.server import Process, error_line, is_ready

_LOG_LINES = 400  # kept to say why a start failed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m launch",
        allow_abbrev=False,
        usage="%(prog)s --model-path MODEL [--policy P] [--policy-config JSON] [--dry-run] [any SGLang flag]",
        description="Start an SGLang server: on this CPU where there is no GPU. Other flags go to SGLang unchanged.",
    )
    parser.add_argument("--policy", metavar="P", help="cache policy: short for --radix-eviction-policy P")
    parser.add_argument("--policy-config", metavar="JSON", help="short for --radix-eviction-policy-config JSON")
    parser.add_argument("--dry-run", action="store_true", help="check and print the command, start nothing")
    return parser


def main(arguments: list[str] | None = None) -> int:
    own, sglang_arguments = _parser().parse_known_args(arguments)
    try:
        command = build(sglang_arguments, policy=own.policy, policy_config=own.policy_config)
    except UsageError as error:
        _say(f"error: {error}")
        return 2
    if own.dry_run:
        print(command.shell())
        return 0
    _say(f"+ {command.shell()}")

    tail: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)

    def on_line(line: str) -> None:
        tail.append(line)
        sys.stdout.write(line)
        sys.stdout.flush()

    received: list[int] = []
    process: Process | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.env}
    process = Process(command.argv, environment, on_line=on_line)
    for early in received:  # before there was anything to forward it to
        process.send(early)

    while process.poll() is None and not is_ready(command.url):
        time.sleep(0.2)
    if process.poll() is None:
        _say(f"ready after {time.monotonic() - begin:.0f} s at {command.url}")
        return process.wait()
    code = process.wait()
    if not received:
        _say(f"error: the server exited with code {code} before it was ready: {error_line(tail)}")
        return code or 1
    return code


if __name__ == "__main__":
    sys.exit(main())
