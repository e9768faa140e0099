"""Which tenant a key belongs to: visibility, cache salt and share."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.config import RouterConfig
from kvrelay_router.access.identity import Callers
from kvrelay_router.access.key_ring import AcceptedKeys

FILE = """
[[key]]
key = "sk-a"
tenant = "acme"
weight = 2

[[key]]
key = "sk-b"
tenant = "acme"
weight = 2
"""
KEYS = ("sk-a", "sk-b", "sk-c", "acme")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def test_without_keys_everybody_sees_all_and_is_one_tenant() -> None:
    callers = Callers.from_config(RouterConfig())
    anybody = callers.of("")
    assert anybody.visible_owner is None and anybody.tenant == anybody.cache_salt == ""


def test_keys_of_a_named_tenant_share_salt_and_weight_but_not_requests(path: Path) -> None:
    callers = Callers.from_config(RouterConfig(api_keys=KEYS, key_limits_file=path, key_cache_salt=True))
    a, b, c, named_like_the_tenant = map(callers.of, KEYS)
    assert (a.tenant, a.weight, a.cache_salt) == (b.tenant, 2.0, b.cache_salt)
    assert a.visible_owner == a.owner != b.owner
    assert len({each.tenant for each in (a, c, named_like_the_tenant)}) == 3
    assert len({each.cache_salt for each in (a, c, named_like_the_tenant)}) == 3
    assert not any(key in f"{callers.of(key)}" for key in KEYS[:3]), "a digest stands for a key"


def test_an_admin_key_is_accepted_and_sees_all(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("# of the operators\nsk-root\n\n")
    config = RouterConfig(api_keys=("sk-a",), admin_api_keys=("sk-admin",), admin_api_keys_file=file)
    accepted = AcceptedKeys.of(config)
    assert accepted.keys == ("sk-a", "sk-admin", "sk-root")
    assert [accepted.callers.of(key).visible_owner is None for key in accepted.keys] == [False, True, True]
    with pytest.raises(ValidationError, match="admin_api_keys_file: cannot read"):
        RouterConfig(admin_api_keys_file=tmp_path / "none")


def test_salts_are_off_unless_asked_for(path: Path) -> None:
    callers = Callers.from_config(RouterConfig(api_keys=KEYS, key_limits_file=path))
    assert {callers.of(key).cache_salt for key in KEYS} == {""}


def test_shares_by_user_and_without_shares() -> None:
    by_user = Callers.from_config(RouterConfig(api_keys=KEYS, fair_queueing="user"))
    ann, bob, same_name = (
        by_user.of("sk-a").share_of("ann"),
        by_user.of("sk-a").share_of("bob"),
        by_user.of("sk-b").share_of("ann"),
    )
    assert len({each.tenant for each in (ann, bob, same_name, by_user.of("sk-a"))}) == 4
    assert ann.owner == bob.owner
    assert by_user.of("").share_of("ann").tenant != by_user.of("").share_of("bob").tenant
    off = Callers.from_config(RouterConfig(api_keys=KEYS, fair_queueing="off"))
    assert {off.of(key).share_of("ann").tenant for key in KEYS} == {""}


def test_texts_belong_to_tenants_whatever_the_shares_and_salts(path: Path) -> None:
    for sharing in ("key", "off"):
        config = RouterConfig.model_validate({"api_keys": KEYS, "key_limits_file": path, "fair_queueing": sharing})
        callers = Callers.from_config(config)
        a, b, c, named_like_the_tenant = (callers.of(key).share_of("ann").text_owner for key in KEYS)
        assert a == b and len({a, c, named_like_the_tenant, ""}) == 4
    by_user = Callers.from_config(RouterConfig(api_keys=KEYS, fair_queueing="user"))
    assert len({by_user.of(key).share_of(user).text_owner for key in KEYS for user in ("ann", "bob", "")}) == 12
    assert Callers().of("sk-x").text_owner not in ("", Callers().of("sk-y").text_owner)


def test_a_key_that_the_settings_do_not_describe_sees_its_own() -> None:
    unknown = Callers().of("sk-x")
    assert unknown.visible_owner == unknown.owner != ""


def test_a_tenant_has_one_weight(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE.replace("weight = 2", "weight = 1", 1))
    with pytest.raises(ValidationError, match="tenant acme has the weights 1 and 2"):
        RouterConfig(api_keys=KEYS, key_limits_file=path)
