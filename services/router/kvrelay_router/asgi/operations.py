"""Routes for models, health, the fleet, recent requests and the end of sessions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.excerpts import quoted
from kvrelay.text.request.api_error import ApiError, no_worker_ready
from kvrelay_router.access.identity import check_session, names_of
from kvrelay_router.http.error_response import json_response
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.api_service import ApiService, ServedModels, model_not_found

DASHBOARD = Path(__file__).parent / "dashboard.html"
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
MAX_LISTED = 100
MAX_ENDED = 256
TIMELINES_AT_ONCE = 32
"""Prompts of a request about which workers are asked together. All that answer together are written together."""


class OperationRoutes:
    """The endpoints that generate nothing."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._service = models.first
        self._version = version("kvrelay")

    async def models(self) -> Response:
        served = [
            self._model(service, name) for service in self._models.services for name in service.settings.model_names
        ]
        return json_response({"object": "list", "data": served})

    async def model(self, model_id: str) -> Response:
        service = self._models.by_name(model_id)
        if service is None:
            raise model_not_found(model_id)
        return json_response(self._model(service, model_id))

    def _model(self, service: ApiService, name: str) -> dict[str, Any]:
        settings, limits = service.settings, service.dispatcher.limits()
        return {
            "id": name,
            "object": "model",
            "created": settings.created,
            "owned_by": "kvrelay",
            "root": settings.model_name,
            "max_model_len": limits.max_model_len if limits else None,
        }

    async def health(self) -> Response:
        """Returns 200 while the process runs."""
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Returns the number of workers by role, or 503 if no request, for any model, could be placed now."""
        services = self._models.services
        if not any(service.dispatcher.ready() for service in services):
            raise no_worker_ready("No worker is ready", 1.0)
        workers = Counter[str]()
        for service in services:
            workers.update(service.dispatcher.ready_workers())
        answer: dict[str, Any] = {"status": "ready", "workers": workers}
        if len(services) > 1:
            answer["models"] = {
                service.settings.model_name: {
                    "ready": service.dispatcher.ready(),
                    "workers": service.dispatcher.ready_workers(),
                }
                for service in services
            }
        return json_response(answer)

    async def version(self) -> Response:
        return json_response({"version": self._version})

    async def fleet(self, http: Request) -> Response:
        """Returns all workers with their state, queues and blocks. If there are several models, everything else stands
        under `models`, by name."""
        owner, services = names_of(http).caller.visible_owner, self._models.services
        fleets = await asyncio.gather(*(service.dispatcher.fleet(owner) for service in services))
        # A whole number, so that the length of the answer to HEAD is that of the answer to GET.
        now_ms = time.time_ns() // 1_000_000
        own = {"memory": self._service.memory.as_json(), "version": self._version, "time_unix_ms": now_ms}
        if len(fleets) == 1:
            return json_response({**fleets[0], **own, "model": self._service.settings.model_name})
        workers = [worker for fleet in fleets for worker in fleet.pop("workers")]
        models = {service.settings.model_name: fleet for service, fleet in zip(services, fleets, strict=True)}
        return json_response({"workers": workers, "models": models, **own})

    async def request(self, http: Request, request_id: str) -> Response:
        """Returns the record of a request by its `x-request-id` or answer id, or 404. Several prompts give a list."""
        owner = names_of(http).caller.visible_owner
        found, share = [], LoopShare()
        for each in self._service.aliases.resolve(request_id, owner):
            for service in self._models.services:
                if (record := service.dispatcher.recent_request(each, owner)) is not None:
                    found.append(record)
            await share.pause()  # a request may have a thousand prompts, and each prompt some twenty attempts
        if not found:
            raise self._not_found(request_id)
        return json_response({"requests": found} if len(found) > 1 else found[0])

    async def requests(self, http: Request) -> Response:
        """Returns the latest requests, newest first. `?session=` selects those of one session."""
        owner, services = names_of(http).caller.visible_owner, self._models.services
        session = http.query_params.get("session") or None
        found = [
            each for service in services for each in service.dispatcher.recent_requests(MAX_LISTED, owner, session)
        ]
        if len(services) > 1:
            found.sort(key=lambda each: each["submitted_unix_s"], reverse=True)
        return json_response({"requests": found[:MAX_LISTED]})

    async def end_session(self, http: Request, session: str) -> Response:
        """Ends a session of the caller, known or not: 204. Workers evict first what only its requests have used."""
        self._end_sessions(http, [session])
        return Response(status_code=204)

    async def end_sessions(self, http: Request) -> Response:
        """Ends each `?session=`, as `end_session` does."""
        sessions = http.query_params.getlist("session")
        if not 0 < len(sessions) <= MAX_ENDED:
            raise ApiError(
                f"Invalid value for 'session': {len(sessions)} sessions; give 1 to {MAX_ENDED}",
                param="session",
                code="invalid_value",
            )
        self._end_sessions(http, sessions)
        return Response(status_code=204)

    def _end_sessions(self, http: Request, sessions: Sequence[str]) -> None:
        checked = [check_session(session) for session in sessions]
        owner = names_of(http).caller.owner
        for service in self._models.services:
            for session in checked:
                service.dispatcher.end_session(session, owner)

    async def timeline(self, http: Request, request_id: str) -> Response:
        """Returns the events of a request with their times, or 404. Accepts the same ids as `request`."""
        owner = names_of(http).caller.visible_owner
        known: list[dict[str, Any]] = []
        names = self._service.aliases.resolve(request_id, owner)
        for start in range(0, len(names), TIMELINES_AT_ONCE):
            asked = [
                service.dispatcher.timeline(each, owner)
                for each in names[start : start + TIMELINES_AT_ONCE]
                for service in self._models.services
            ]
            known += [timeline for timeline in await asyncio.gather(*asked) if timeline is not None]
        if not known:
            raise self._not_found(request_id)
        return json_response({"timelines": known})

    async def dashboard(self) -> Response:
        """Returns the fleet page. The page itself holds no data: it requests them, with the key if one is required."""
        return Response(DASHBOARD.read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    def _not_found(self, request_id: str) -> ApiError:
        router_id = self._service.settings.router_id
        return ApiError(
            f"No request {quoted(request_id)} is known to {router_id}: the router that served it names itself in the "
            f"answer's header x-kvrelay-router",
            status=404,
            code="request_not_found",
        )
