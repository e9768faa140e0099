"""What the import of NIXL may not do to the process that imports it."""

from __future__ import annotations

import io
import logging
import logging.config
import sys
from pathlib import Path

import pytest

from kvrelay.handoff.transports import nixl_agent
from kvrelay.handoff.transports.nixl_agent import TransportUnavailable, import_api
from kvrelay.logs import BackgroundHandler

pytestmark = pytest.mark.unit

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
