"""`python -m benchmarks ...` in this process, for the tests of its commands."""

import pytest

from benchmarks.__main__ import main


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    try:
        status = main(list(words))
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err
