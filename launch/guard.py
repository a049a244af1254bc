"""Stands between a launcher and its server so that nothing is left running, however either of them ends.

Run by file path with the standard library only: ``python -I guard.py LAUNCHER_PID GRACE_SECONDS -- COMMAND...``. It
starts COMMAND in its own session, forwards SIGTERM, SIGINT and SIGHUP to it, and exits with the command's exit code
(128 + n if signal n killed it). Every process that the command leaves behind is killed before the guard exits, also
one that moved to another process group or session: the guard is the subreaper of all of them.

- The command does not stop within GRACE_SECONDS of the first signal, or a second signal comes: everything is killed.
- The launcher dies, by SIGKILL too: everything is killed. (Seen by polling the parent's pid rather than with
  PR_SET_PDEATHSIG, which also fires when only the *thread* that started the guard ends.)
- The guard itself is killed: the command gets SIGKILL through PR_SET_PDEATHSIG; SGLang's children do the same.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Pids of all living descendants of ``root``, children before grandchildren, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # The name in parentheses may hold anything; the state and the parent's pid follow the last ")".
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found += frontier
    return found


class Guard:
    """One command under guard; see the module's text for the contract."""

    def __init__(self, launcher: int, grace_s: float, command: list[str]) -> None:
        self.launcher = launcher
        self.grace_s = grace_s
        self.command = command
        self.signals: list[int] = []
        self.child = 0
        self.status: int | None = None

    def run(self) -> int:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            # preexec_fn is safe here: this process has one thread.
            self.child = subprocess.Popen(self.command, preexec_fn=self._in_child).pid
        except OSError as error:
            print(f"cannot start {self.command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            return 127
        deadline = float("inf")
        forwarded = 0
        while True:
            self._reap()
            if self.status is not None:
                self._kill_all()
                return self._exit_code(self.status)
            if os.getppid() != self.launcher or time.monotonic() > deadline or len(self.signals) > 1:
                self._kill_all()
                return 128 + signal.SIGKILL
            if len(self.signals) > forwarded:
                forwarded = len(self.signals)
                deadline = time.monotonic() + self.grace_s
                os.kill(self.child, self.signals[-1])
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    @staticmethod
    def _in_child() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = status

    def _kill_all(self) -> None:
        # Orphans of a killed process become children of this subreaper, so the loop meets them on its next turn.
        while pids := descendants(os.getpid()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)
        self._reap()

    @staticmethod
    def _exit_code(status: int) -> int:
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    launcher, grace, separator, *command = arguments
    if separator != "--" or not command:
        print("usage: guard.py LAUNCHER_PID GRACE_SECONDS -- COMMAND...", file=sys.stderr)
        return 2
    return Guard(int(launcher), float(grace), command).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
