"""The ports that a stack opens with its defaults. `tests/e2e/test_security.py` has each transport."""

from __future__ import annotations

import pytest

from tests.e2e.open_ports import check_ports
from tests.fakes.stack import Stack

pytestmark = pytest.mark.e2e


def test_nothing_listens_beyond_loopback_unless_told_to(demo_stack: Stack) -> None:
    check_ports(demo_stack)
