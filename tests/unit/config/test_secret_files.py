"""Files with secrets that everybody can read are told of."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvrelay.config import RouterConfig
from kvrelay.process import readable_by_all


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_all_can_read_is_told_of(mode: int, warns: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others get to /tmp, but not to pytest's directories in it
        directory = Path(name)
        directory.chmod(0o755)
        path = directory / "keys"
        path.write_text("sk-one\n")
        path.chmod(mode)
        config = RouterConfig(api_keys_file=path)
        assert config.secret_files == [path]
        messages = list(readable_by_all(config.secret_files))
        assert [str(path) in each and "sk-" not in each for each in messages] == [True] * warns
        directory.chmod(0o700)
        assert list(readable_by_all([path])) == [], "nobody else gets there"
