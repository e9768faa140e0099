"""Files with secrets that everybody can read are told of."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.config import RouterConfig
from kvrelay.process import readable_by_all


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_all_can_read_is_told_of(tmp_path: Path, mode: int, warns: bool) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    path = tmp_path / "keys"
    path.write_text("sk-one\n")
    path.chmod(mode)
    config = RouterConfig(api_keys_file=path)
    assert config.secret_files == [path]
    messages = list(readable_by_all(config.secret_files))
    assert [str(path) in each and "sk-" not in each for each in messages] == [True] * warns
    tmp_path.chmod(0o700)
    assert list(readable_by_all([path])) == [], "nobody else gets there"
