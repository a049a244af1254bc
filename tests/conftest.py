"""Options and markers of the whole suite: tests marked ``slow`` run only with ``--slow``."""

import signal

import pytest
from hypothesis import HealthCheck, settings

# how fast this machine draws examples is no test: the first draw of text builds a table that takes a second
settings.register_profile("sglang-scout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sglang-scout")

# a shell starts what runs behind `&` or nohup with these ignored, and what the tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
