"""The models of a router: which service takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from kvrelay_router.dispatch.interface import Dispatcher
from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.request_metrics import TIMINGS
from kvrelay_router.openai.settings import ApiSettings
from kvrelay_router.text.service import TextService


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A model that a router serves beside its first."""

    names: tuple[str, ...]
    dispatcher: Dispatcher
    text: TextService

    def service_beside(self, first: ApiService) -> ApiService:
        """The service of this model. Limits of requests, ids and memory are those of the first service."""
        settings = replace(first.settings, model_names=self.names)
        return replace(first, settings=settings, dispatcher=self.dispatcher, text=self.text)


class ServedModels:
    """One service for each model. They share everything but text service, dispatcher and names."""

    def __init__(self, services: Sequence[ApiService]) -> None:
        self.services = tuple(services)
        self._by_name = {name: service for service in services for name in service.settings.model_names}

    @property
    def first(self) -> ApiService:
        """The service for requests that name no model."""
        return self.services[0]

    @property
    def settings(self) -> ApiSettings:
        """The settings that all services share, and the names of the first."""
        return self.first.settings

    def by_name(self, name: str) -> ApiService | None:
        return self._by_name.get(name)

    def select(self, http: Request, content: dict[str, Any]) -> ApiService:
        """Returns the service of the model that the body names. Without one, or with an unknown one, it is the first,
        whose checks of the request give the error."""
        model = content.get("model")
        service = self._by_name.get(model, self.first) if isinstance(model, str) else self.first
        if (timings := http.scope["state"].get(TIMINGS)) is not None:
            timings.model = service.settings.model_name
        return service

    async def read(self, http: Request) -> tuple[ApiService, dict[str, Any]]:
        """Returns the body as a JSON object, and the service of its model. Raises the errors of `read_json_object`."""
        content = await read_json_object(http, self.settings.max_body_bytes)
        return self.select(http, content), content
