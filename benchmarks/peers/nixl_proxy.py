"""A minimal proxy in front of one prefill and one decode instance of vLLM with NixlConnector.

It takes the steps of vLLM's own toy_proxy_server: the prompt goes to prefill with `do_remote_decode` and one token to
generate, and the answer's `kv_transfer_params` go to decode with the request. Runs in vLLM's environment, with aiohttp.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill instance."""
    dropped = ("stream_options", "min_tokens", "max_completion_tokens")
    kept = {name: value for name, value in body.items() if name not in dropped}
    return kept | {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}


def main() -> None:
    import aiohttp  # type: ignore[import-not-found, unused-ignore]
    from aiohttp import web

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    given = parser.parse_args()
    session: list[Any] = []

    async def open_session(_: Any) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as opened:
            session.append(opened)
            yield

    async def complete(request: Any) -> Any:
        body = json.loads(await request.read())
        headers = {"content-type": "application/json", "x-request-id": str(uuid.uuid4())}
        async with session[0].post(given.prefill + request.path, json=prefill_body(body), headers=headers) as answer:
            text = await answer.read()
            if answer.status != 200:
                return web.Response(status=answer.status, body=text)
            body["kv_transfer_params"] = json.loads(text)["kv_transfer_params"]
        async with session[0].post(given.decode + request.path, json=body, headers=headers) as answer:
            content_type = answer.headers.get("content-type", "application/json")
            out = web.StreamResponse(status=answer.status, headers={"content-type": content_type})
            await out.prepare(request)
            async for piece in answer.content.iter_any():
                await out.write(piece)
            await out.write_eof()
            return out

    async def models(request: Any) -> Any:
        async with session[0].get(given.decode + request.path) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    application = web.Application(client_max_size=1 << 28)
    application.cleanup_ctx.append(open_session)
    application.router.add_post("/v1/completions", complete)
    application.router.add_post("/v1/chat/completions", complete)
    application.router.add_get("/v1/models", models)
    web.run_app(application, host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
