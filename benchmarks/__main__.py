"""`python -m benchmarks COMMAND ...`. Every command is a module with `add_parser(sub)` and `run(args) -> int`.

Only the module of the command that was asked for is imported: `simulate` needs numpy alone, not SGLang, torch or an
HTTP client. `args.argv` holds the words after the command, for the record in the result file. Exit status: 0 done,
1 the benchmark failed, 2 the command cannot be carried out as given (one line on stderr), 130, 143 or 129 stopped by
SIGINT, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from benchmarks.pool import Stopped, WorkerLost, signals_raise, status_of
from benchmarks.results import UsageError
from radix_policy.config import ConfigError
from radix_policy.workloads import WorkloadError

COMMANDS = {
    "simulate": "hit rates in the simulator: policies, capacities, concurrency, with the offline optimum",
    "replay": "a workload or trace against a running server",
    "compare": "starts servers itself, one per policy and pool size, and replays on each",
    "demo": "the six-agent workload on a real server under lru and scout, with a report",
    "micro": "hot-path costs of the tree cores and policies",
    "host": "the host tier in the simulator: admission modes and sizes",
    "warmup": "warmup off, on and ungated, in the simulator or on servers",
    "identity": "inferred agents and sessions against the recorded ones, and the cost in hit rate",
    "study": "every figure of RESULTS.md, in the simulator",
    "report": "HTML and plots from result files",
}


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, and an option is given by its whole name: the record must know it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **more})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="python -m benchmarks", description="Benchmarks of sglang-scout.")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    name = words[0] if words and words[0] in COMMANDS else None
    if name is None:
        for command, text in COMMANDS.items():
            if importlib.util.find_spec(f"benchmarks.{command}") is None:
                continue
            sub.add_parser(command, help=text)
        parser.parse_args(words)
        raise AssertionError("unreachable: no command, and argparse did not stop")
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"benchmarks.{name}":
            return _fail(name, "this command is not part of this checkout", 2)
        return _fail(name, f"needs the Python package {error.name!r}: pip install 'sglang-scout[bench]'", 2)
    module.add_parser(sub)
    args = parser.parse_args(words)
    args.argv = words[1:]
    try:
        with signals_raise():
            status = int(module.run(args))
            sys.stdout.flush()  # here, where a full disk or a reader that went away can still be told
            return status
    except (UsageError, ConfigError, WorkloadError) as error:
        return _fail(name, str(error), 2)
    except (KeyboardInterrupt, Stopped) as stop:
        return _fail(name, str(stop) or "interrupted", status_of(stop))
    except WorkerLost as error:
        return _fail(name, str(error), 1)
    except BrokenPipeError:
        _drop_output()
        return 141  # as a shell has it for SIGPIPE
    except OSError as error:
        _drop_output()
        return _fail(name, f"{error.filename or 'output'}: {error.strerror or error}", 1)


def _drop_output() -> None:
    """What is still in the buffer cannot be written; Python would try again at its end and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(command: str, message: str, status: int) -> int:
    print(f"python -m benchmarks {command}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
