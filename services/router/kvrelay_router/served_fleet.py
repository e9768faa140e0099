"""One model of a router with its fleet: text service, dispatcher, registry and prefix index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.config.common import is_wildcard
from kvrelay.config.router import RouterConfig
from kvrelay.fleet import Registry
from kvrelay.fleet.index import IndexFeed, IndexReader
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import LinkEvent, LinkSettings
from kvrelay.telemetry.event_log import EventLog
from kvrelay.telemetry.tracer import Tracer
from kvrelay.text.service import TextService
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings
from kvrelay_router.fleet.watch import ListWorkers, StaticWorkers
from kvrelay_router.openai.api_service import ApiSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedFleet:
    """`config` is the one for this fleet (`RouterConfig.fleets`)."""

    config: RouterConfig
    text: TextService
    dispatcher: RouterDispatcher


async def load_text(config: RouterConfig, closing: contextlib.AsyncExitStack) -> TextService:
    """Loads the tokenizer and starts the compiler of grammars."""
    started = time.monotonic()
    text = await asyncio.to_thread(
        TextService.load,
        config.model,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )
    closing.callback(text.close)
    text.grammars.start()
    log.info("tokenizer of %s loaded in %.1f s", config.model, time.monotonic() - started)
    return text


async def start_fleet(
    config: RouterConfig,
    api: ApiSettings,
    closing: contextlib.AsyncExitStack,
    events: EventLog | None,
    tracer: Tracer | None,
    *,
    other_models: frozenset[str] = frozenset(),
) -> ServedFleet:
    """Loads the tokenizer and connects to the fleet; `closing` closes both. `other_models`: those of the router's other
    fleets."""
    text = await load_text(config, closing)
    dispatcher = RouterDispatcher(
        lambda on_event: _open_messenger(config, on_event),
        _registry(config, closing),
        _dispatch_settings(config, api, text.tokenizer_identity),
        events,
        _prefix_index(config),
        tracer,
        _static_workers(config, other_models),
    )
    closing.push_async_callback(dispatcher.close)
    dispatcher.start()
    return ServedFleet(config, text, dispatcher)


def _registry(config: RouterConfig, closing: contextlib.AsyncExitStack) -> ListWorkers | None:
    if not config.uses_redis:
        return None
    registry = Registry(config.redis_url, config.redis_prefix)
    closing.push_async_callback(registry.close)
    return lambda: registry.list_workers(config.model_name)


def _open_messenger(config: RouterConfig, on_event: Callable[[LinkEvent], None]) -> Messenger:
    return Messenger(
        config.router_id,
        on_event,
        host=config.message_host or config.host,
        port=config.message_port,
        advertise_host=_message_address(config),
        settings=LinkSettings(
            alive_interval_s=config.peer_interval_s, peer_timeout_s=config.peer_timeout_s, max_peers=config.max_peers
        ),
        curve=config.curve_keys(),
    )


def _message_address(config: RouterConfig) -> str:
    """The address at which workers reach the inbox: the bound one, unless that is every interface."""
    host = config.message_host
    return host if host is not None and not is_wildcard(host) else config.reachable_host


def _static_workers(config: RouterConfig, other_models: frozenset[str]) -> StaticWorkers | None:
    if not config.static_workers:
        return None
    return StaticWorkers(config.static_workers, config.model_name, other_models=other_models)


def _prefix_index(config: RouterConfig) -> IndexFeed | None:
    if not config.uses_redis:
        return None
    return IndexFeed(IndexReader(config.redis_url, config.redis_prefix, config.model_name))


def _dispatch_settings(config: RouterConfig, api: ApiSettings, tokenizer: str) -> DispatchSettings:
    return DispatchSettings(
        tokenizer=tokenizer,
        policy=config.routing_policy,
        local_prefill_tokens=config.local_prefill_tokens,
        ttft_deadline_s=config.ttft_deadline_s,
        max_attempts=config.max_attempts,
        max_wait_for_worker_s=config.max_wait_for_worker_s,
        # The HTTP layer bounds its requests; one of them may still bring many prompts.
        max_requests=config.max_queued_requests + api.max_sequences,
    )
