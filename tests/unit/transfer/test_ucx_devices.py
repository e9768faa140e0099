"""NIXL and UCX: which devices an address gets, and what an import may not do to its process."""

from __future__ import annotations

import io
import logging
import logging.config
import socket
import sys
from pathlib import Path

import pytest

from kvrelay.handoff.transports import nixl_agent
from kvrelay.handoff.transports.nixl_agent import VARIABLE, TransportUnavailable, devices_for, import_api
from kvrelay.logs import BackgroundHandler

ADDRESSES = {"lo": "127.0.0.1", "eth0": "192.0.2.2", "eth1": "198.51.100.2", "down0": None}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four interfaces, one of which has no address."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(ADDRESSES)))
    monkeypatch.setattr(nixl_agent, "_first_address", ADDRESSES.__getitem__)


@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("127.0.0.1", "lo"),
        ("127.7.0.3", "lo"),
        ("::1", "lo"),
        ("localhost", "lo"),
        ("192.0.2.2", "^eth1,lo"),
        ("198.51.100.2", "^eth0,lo"),
        ("0.0.0.0", ""),
        ("::", ""),
        ("*", ""),
        (None, ""),
    ],
)
def test_an_address_chooses_its_device_and_a_wildcard_all(host: str | None, devices: str) -> None:
    assert devices_for(host) == devices


@pytest.mark.parametrize(
    ("advertise_host", "devices", "warns"),
    [
        ("192.0.2.2", "^eth1,lo", False),
        ("198.51.100.2", "^eth0,lo", False),
        (None, "", False),
        ("203.0.113.1", "", True),  # a machine behind address translation
        ("localhost", "", True),
        ("no-such-host.invalid", "", True),
    ],
)
def test_a_wildcard_stands_for_the_interface_of_the_advertised_address(
    advertise_host: str | None, devices: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for host in ("0.0.0.0", None):
        assert devices_for(host, advertise_host) == devices
    assert devices_for("198.51.100.2", advertise_host) == "^eth0,lo"
    assert (f"the address of {advertise_host}" in caplog.text) == warns


@pytest.mark.parametrize("host", ["192.0.2.3", "2001:db8::7", "no-such-host.invalid"])
def test_an_address_that_ucx_cannot_listen_at_is_refused(host: str) -> None:
    with pytest.raises(TransportUnavailable, match=host):
        devices_for(host)


def test_what_the_environment_names_is_kept_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "eth1")
    assert devices_for("127.0.0.1") == ""
    assert "UCX_NET_DEVICES=eth1" in caplog.text
    caplog.clear()
    assert devices_for("0.0.0.0", "192.0.2.2") == "" and not caplog.text


def test_the_only_interface_needs_no_exclusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    assert devices_for("192.0.2.2") == ""


def test_the_kernel_tells_the_address_of_the_loopback_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv(VARIABLE, raising=False)
    device = devices_for("127.0.0.1")
    assert device in [name for _, name in socket.if_nameindex()]


# -- what the import of nixl may not do to the process that imports it -----------------------------------------------


CONFIGURES_LOGGING = """
import logging.config

logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
logging.raiseExceptions = False
"""


@pytest.mark.parametrize("then", ["", "raise ImportError('no library')\n"])
def test_the_log_goes_on(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "configuring_nixl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(CONFIGURES_LOGGING + then)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl_agent, "PACKAGES", (package.name,))
    for module in (package.name, f"{package.name}._api"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    stream = io.StringIO()
    handler, log = BackgroundHandler(stream), logging.getLogger("of a worker with nixl")
    log.addHandler(handler)
    try:
        configure = logging.config.dictConfig
        if then:
            with pytest.raises(TransportUnavailable, match="no library"):
                import_api()
        else:
            import_api()
        assert logging.config.dictConfig is configure and logging.raiseExceptions
        log.warning("a line after the import")
        handler.flush()
        assert stream.getvalue() == "a line after the import\n"
    finally:
        log.removeHandler(handler)
        handler.close()
