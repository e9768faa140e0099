"""The HTTP layer takes its part of the router's config."""

from __future__ import annotations

from pydantic import SecretStr

from kvrelay.config.router import RouterConfig
from kvrelay_router.openai.api_service import ApiSettings


def test_settings_come_from_the_config() -> None:
    config = RouterConfig(
        model="org/name",
        api_keys=(SecretStr("one"), SecretStr("two")),
        request_timeout_s=7.0,
        max_queued_requests=5,
    )
    settings = ApiSettings.from_config(config)
    assert settings.model_name == "org/name"
    assert settings.api_keys == ("one", "two")
    assert (settings.request_timeout_s, settings.max_requests) == (7.0, 5)
