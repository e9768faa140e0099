"""Limits of single keys from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.config import RouterConfig
from kvrelay_router.openai.api_service import ApiSettings


def test_a_keys_own_entry_wins_and_the_rest_is_as_for_all(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text('[[key]]\nkey = "sk-a"\nconcurrency = 8\n\n[[key]]\nkey = "sk-b"\nleast_priority = -5\n')
    config = RouterConfig(
        api_keys=("sk-a", "sk-b", "sk-c"),
        key_requests_per_minute=60,
        key_concurrency=2,
        key_least_priority=0,
        key_limits_file=path,
    )
    settings = ApiSettings.from_config(config)
    a, b = settings.own_key_rules["sk-a"], settings.own_key_rules["sk-b"]
    assert (a.limits.concurrency, a.limits.requests_per_minute, a.least_priority) == (8, 60, 0)
    assert (b.limits.concurrency, b.least_priority) == (2, -5)
    assert settings.key_rules.limits.concurrency == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            '[[key]]\nkey = "sk-secret"\nconcurrency = 0\n',
            "number 1: concurrency: must be a whole number, 1 to",
        ),
        ('[[key]]\nkey = "sk-secret"\nburts = 1\n', "number 1: burts is not a known field; did you mean burst?"),
        ('[[key]]\nkey = "sk-secret"\ntenant = "a b"\n', "number 1: tenant: must be 1 to 64 of the characters"),
        ("[[key]]\nburst = 1\n", "number 1: key is needed"),
        ('concurrency = "sk-secret"\n', "[[key]] tables"),
        ("[[key]\n", "not valid TOML"),
        ('[[key]]\nkey = "sk-secret"\nrequests_per_minute = 1e-300\n', "must be a number, 0.001 to"),
        ('[[key]]\nkey = "sk-secret"\n', "number 1 has a key that is neither in api_keys"),
        ('[[key]]\nkey = "sk-known"\n' * 2, "number 2 has the key of an earlier one"),
    ],
)
def test_a_bad_file_is_refused_by_field_and_shows_no_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(ValidationError) as caught:
        RouterConfig(api_keys=("sk-known",), key_limits_file=path)
    assert named in str(caught.value) and "sk-secret" not in str(caught.value)
