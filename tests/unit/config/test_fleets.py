"""Further models of a router, from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.config import RouterConfig
from kvrelay.fleet.key_limits import SharedLimits
from kvrelay_router.server import _limits

TWO = """
[[fleet]]
model = "org/second"
served_model_name = "second, 2nd"
tool_parser = "hermes"

[[fleet]]
model = "org/third"
served_model_name = "third"
"""


def config(tmp_path: Path, text: str, **fields: object) -> RouterConfig:
    path = tmp_path / "fleets.toml"
    path.write_text(text)
    return RouterConfig(**{"model": "org/first", "fleets_file": path, **fields})


def test_without_a_file_there_is_one_fleet() -> None:
    alone = RouterConfig(model="org/first")
    assert alone.fleets() == (alone,)


def test_a_fleet_has_its_own_fields_and_the_routers_others(tmp_path: Path) -> None:
    router = config(tmp_path, TWO, tool_parser="mistral", message_port=7000, router_id="r", max_peers=90)
    fleets = router.fleets()
    assert [each.model for each in fleets] == ["org/first", "org/second", "org/third"]
    assert [each.model_names for each in fleets] == [("org/first",), ("second", "2nd"), ("third",)]
    assert [each.tool_parser for each in fleets] == ["mistral", "hermes", "auto"]
    assert [each.message_port for each in fleets] == [7000, 7001, 7002]
    assert {each.max_peers for each in fleets} == {30}
    assert {each.router_id for each in fleets} == {"r"}
    assert {each.message_port for each in config(tmp_path, TWO).fleets()} == {0}
    with pytest.raises(ValidationError, match="one for each fleet"):
        config(tmp_path, TWO, message_port=65534)


def test_routers_of_the_same_models_count_the_limits_of_keys_together(tmp_path: Path) -> None:
    entry = '[[fleet]]\nmodel = "org/{0}"\nserved_model_name = "org/{0}"\n'
    configs = []
    for first, *others in (["a", "b", "c"], ["c", "b", "a"], ["a"], ["b"]):
        path = tmp_path / f"{first}{len(others)}.toml"
        path.write_text("".join(entry.format(each) for each in others))
        configs.append(RouterConfig(model=f"org/{first}", fleets_file=path if others else None))
    keys = [tuple(limits._keys("key")) for each in configs if isinstance(limits := _limits(each), SharedLimits)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert "{org/a}" in keys[2][0], "a router of one model keeps its name"


FLEET = '[[fleet]]\nmodel = "org/m"\nserved_model_name = '


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "must hold 1 to 63"),
        ("fleet = 3\n", "and nothing else"),
        ('x = 1\n[[fleet]]\nmodel = "org/m"\nserved_model_name = "m"\n', "nothing else"),
        ("[[fleet]\n", "not valid TOML"),
        ('[[fleet]]\nmodel = "org/m"\n', "number 1: served_model_name is needed"),
        ('[[fleet]]\nmodel = ""\nserved_model_name = "n"\n', "number 1: model: must be text that is not empty"),
        (f'{FLEET}"m"\nmodle = "m"\n', "modle is not a known field; did you mean model"),
        (f'{FLEET}"m, "\n', "1 to 200 characters"),
        (f'{FLEET}"org/first"\n', "'org/first' is the name of org/first and of org/m"),
        (f'{FLEET}"m"\n{FLEET}"n, m"\n', "'m' is the name of org/m and of org/m"),
        ('[[fleet]]\nmodel = "./no such model"\nserved_model_name = "m"\n', "there is no directory"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(tmp_path, text)
    assert named in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot read"):
        RouterConfig(model="org/first", fleets_file=tmp_path / "none.toml")
