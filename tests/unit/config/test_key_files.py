"""Files with the fleet's keys: what they may hold, and what `kvrelay keys` writes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvrelay.config import ConfigError, RouterConfig, load_config
from kvrelay.curve import BadKeyFile, CurveKey, CurveKeys, KeysDiffer, advertised, key_for, read_keys
from tests.fakes.command import command

keys = command("keys")
OLD, NEW = CurveKey.new(), CurveKey.new()


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert keys([str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (made,) = read_keys(path)
    printed = capsys.readouterr().out
    assert made.fingerprint in printed and made.secret.decode() not in printed + repr(made)
    assert keys([str(path)]) == 1 and "File exists" in capsys.readouterr().err
    assert read_keys(path) == (made,)
    assert keys(["-"]) == 0
    path.write_text(path.read_text() + capsys.readouterr().out)
    first, second = read_keys(path)
    assert first == made != second
    config = load_config(RouterConfig, ["--curve-key-file", str(path)], environ={"KVRELAY_MODEL": "org/model"})
    curve = config.curve_keys()
    assert curve is not None and curve.own == made
    assert made.secret.decode() not in str(config.printable())


@pytest.mark.parametrize("content", ["", "# only a comment\n", "too short\n", f"{'0' * 40}\n{'~' * 40}\n", "é" * 40])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(BadKeyFile):
        CurveKeys.read(path)
    with pytest.raises(ConfigError, match=r"--curve-key-file = .*key"):
        load_config(RouterConfig, ["--curve-key-file", str(path)], environ={"KVRELAY_MODEL": "org/model"})


ADDRESS = "tcp://10.0.0.1:5000"
OF_OLD, OF_NEW = (advertised(ADDRESS, CurveKeys(key)) for key in (OLD, NEW))


@pytest.mark.parametrize(
    ("address", "curve", "key"),
    [
        (ADDRESS, None, None),
        (OF_OLD, CurveKeys(OLD), OLD),
        (OF_OLD, CurveKeys(NEW, OLD), OLD),
        (OF_NEW, CurveKeys(NEW, OLD), NEW),
        (OF_NEW, CurveKeys(OLD), KeysDiffer),
        (OF_NEW, None, KeysDiffer),
        (ADDRESS, CurveKeys(OLD), KeysDiffer),
        (ADDRESS + "#", CurveKeys(OLD), KeysDiffer),
    ],
    ids=range(8),  # keys are random, and processes that share the tests must name them alike
)
def test_a_client_uses_the_key_that_the_address_names(
    address: str, curve: CurveKeys | None, key: CurveKey | type[KeysDiffer] | None
) -> None:
    if key is KeysDiffer:
        with pytest.raises(KeysDiffer, match="both need a key in common"):
            key_for(address, curve)
    else:
        assert key_for(address, curve) == key


def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_text(OLD.text())
    curve = CurveKeys.read(path)
    path.write_text(NEW.text() + OLD.text())
    assert key_for(OF_NEW, curve) == NEW
    assert curve.own == OLD, "its sockets keep their key"
    path.write_text("half of a li")
    assert key_for(OF_NEW, curve) == NEW
    assert [str(path) in each for each in caplog.messages] == [True]
    third = CurveKey.new()
    path.write_text(third.text())
    assert list(curve.known()) == [OLD.fingerprint, third.fingerprint], "removed, but for its own"
