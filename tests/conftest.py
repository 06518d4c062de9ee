# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one mounted server with one baked template for the whole session, and what to show when a test fails."""
import contextlib

import pytest
from vmenv import Sandbox, Server, Watchdog, tail

BASE = {'disk_mb': 128, 'timeout': 120, 'setup': ['echo "set up" > /etc/ready', 'echo said by setup']}


class Session:
    """The session's server, started when first asked for, and again if a test ended it."""

    def __init__(self):
        self.server = None

    def get(self):
        if self.server is None:
            self.server = Server()
        if not self.server.alive():
            self.server.kill()
            self.server.start()
        if 'base' not in [entry.name for entry in (self.server.mount / 'templates').iterdir()]:
            self.server.bake('base', config=BASE)
        return self.server

    def close(self):
        if self.server:
            self.server.close()


@pytest.fixture(scope='session')
def session():
    holder = Session()
    yield holder
    holder.close()


@pytest.fixture
def mount(session):
    """The session's server, with the template `base`; what the test leaves in sandboxes/ is removed."""
    server = session.get()
    yield server
    if server.alive():
        for entry in list((server.mount / 'sandboxes').iterdir()):
            Sandbox(server, entry.name).remove()


@pytest.fixture
def sandbox(mount):
    """A fresh sandbox from `base`."""
    return mount.create()


def limit(item):
    marker = item.get_closest_marker('timeout')
    return float(marker.args[0]) if marker and marker.args else float(item.config.getini('timeout') or 180)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    watchdog = Watchdog(limit(item) + 60)
    yield
    watchdog.cancel()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if not report.failed:
        return
    for server in list(Server.live):
        for name in ('error', 'templates/base/log'):
            report.sections.append((f'tail of {name}', tail(server.mount / name)))
        for path in (server.state / 'emulated.log', server.log):
            with contextlib.suppress(OSError):
                if path.exists():
                    report.sections.append((f'tail of {path.name}', tail(path)))
