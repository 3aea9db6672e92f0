"""A pytest plugin that reports failures at once, because the process may be stopped later."""

import pytest


class _AtOnce:
    def __init__(self, config):
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(trylast=True)  # after the outcome is written
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._reporter.write_line("")
            for line in f"{report.nodeid}, {report.when}\n{report.longreprtext}".splitlines():
                self._reporter.write_line(f"| {line}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.pluginmanager.register(_AtOnce(config))
