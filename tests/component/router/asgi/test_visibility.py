"""Whose requests a key sees, and which salt its requests get, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvrelay.config import RouterConfig
from kvrelay.text.service import TextService
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing
from tests.component.router.rig import MODEL, Router, running_router

ANN, BOB, ADMIN = "sk-ann", "sk-bob", "sk-admin"
CONFIG = RouterConfig(api_keys=(ANN, BOB), admin_api_keys=(ADMIN,), key_cache_salt=True)


@pytest.fixture
async def shared(text: TextService) -> AsyncIterator[Router]:
    async with running_router(text, keys=KeyRing(AcceptedKeys.of(CONFIG))) as router:
        yield router


def key(name: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"} | headers


async def ask(router: Router, name: str, **fields: object) -> str:
    """Sends a request with the id `mine`, and returns its answer's id."""
    body = {"model": MODEL, "prompt": "An otter", **fields}
    answer = await router.http.post("/v1/completions", json=body, headers=key(name, **{"x-request-id": "mine"}))
    assert answer.status_code == 200
    return str(answer.json()["id"]).removeprefix("cmpl-")


async def listed(router: Router, name: str) -> list[str]:
    answer = await router.http.get("/requests", headers=key(name))
    return [each["request_id"] for each in answer.json()["requests"]]


async def test_a_key_lists_its_own_requests_and_an_admin_key_all(shared: Router) -> None:
    of_ann, of_bob = await ask(shared, ANN), await ask(shared, BOB)
    assert await listed(shared, ANN) == [of_ann]
    assert await listed(shared, BOB) == [of_bob]
    assert sorted(await listed(shared, ADMIN)) == sorted([of_ann, of_bob])


async def test_requests_of_a_session_are_listed_together_and_by_key(shared: Router) -> None:
    asked: dict[tuple[str, str], list[str]] = {}
    for name in (ANN, BOB, ANN):
        for session in ("otter", "x" * 128, ""):
            headers = key(name, **{"x-kvrelay-session": session})
            answer = await shared.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
            asked.setdefault((name, session), []).append(str(answer.json()["id"]).removeprefix("cmpl-"))
    await ask(shared, ANN, user="user's own")  # without the header, `user` is the session

    async def found(name: str, session: str) -> list[str]:
        answer = await shared.http.get("/requests", params={"session": session}, headers=key(name))
        return [each["request_id"] for each in answer.json()["requests"]]

    for (name, session), ids in asked.items():
        if session:
            assert await found(name, session) == ids
    assert sorted(await found(ADMIN, "otter")) == sorted(asked[ANN, "otter"] + asked[BOB, "otter"])
    assert len(await found(ANN, "user's own")) == 1
    assert await found(BOB, "user's own") == await found(ADMIN, "none") == []
    assert len(await found(ANN, "")) == 7


async def test_a_session_ends_for_its_owner_alone(shared: Router) -> None:
    for name in (ANN, BOB):
        answer = await shared.http.delete("/sessions/otter", headers=key(name))
        assert (answer.status_code, answer.content) == (204, b"")
    (ann, session), (bob, same) = shared.dispatcher.ended_sessions
    assert session == same == "otter" and ann != bob
    await ask(shared, ANN)
    assert shared.dispatcher.handles[-1].request.owner == ann
    refused = await shared.http.delete(f"/sessions/{'x' * 129}", headers=key(ANN))
    assert refused.status_code == 400 and len(shared.dispatcher.ended_sessions) == 2
    assert (await shared.http.delete("/sessions/otter")).status_code == 401


async def test_many_sessions_end_in_one_request_or_none_does(shared: Router) -> None:
    before = len(shared.dispatcher.ended_sessions)

    async def end(*names: str) -> int:
        return (await shared.http.delete("/sessions", params={"session": names}, headers=key(ANN))).status_code

    assert await end("otter", "x" * 129) == await end() == await end(*map(str, range(257))) == 400
    assert (await shared.http.delete("/sessions?session=otter")).status_code == 401
    assert len(shared.dispatcher.ended_sessions) == before
    assert await end("otter", "a,b") == 204
    (ann, one), (same, other) = shared.dispatcher.ended_sessions[before:]
    assert (one, other) == ("otter", "a,b") and ann == same


@pytest.mark.parametrize("end", ["", "/timeline"])
async def test_a_request_of_another_key_looks_unknown(shared: Router, end: str) -> None:
    of_ann = await ask(shared, ANN)
    for name in (of_ann, f"cmpl-{of_ann}", "mine"):
        path = f"/requests/{name}{end}"
        assert (await shared.http.get(path, headers=key(ANN))).status_code == 200
        assert (await shared.http.get(path, headers=key(ADMIN))).status_code == 200
        hidden, unknown = [await shared.http.get(each, headers=key(BOB)) for each in (path, f"/requests/none{end}")]
        assert hidden.status_code == unknown.status_code == 404
        assert hidden.json()["error"]["code"] == unknown.json()["error"]["code"]


async def test_another_key_that_sends_the_same_id_hides_nothing(shared: Router) -> None:
    of_ann = await ask(shared, ANN)
    of_bob = await ask(shared, BOB)
    for name, expected in ((ANN, of_ann), (BOB, of_bob), (ADMIN, of_bob)):
        assert (await shared.http.get("/requests/mine", headers=key(name))).json()["id"] == expected


async def test_each_tenant_has_a_salt_before_the_requests_own(shared: Router) -> None:
    for name in (ANN, ANN, BOB):
        await ask(shared, name, cache_salt="x")
    first, second, other = (handle.request.cache_salt for handle in shared.dispatcher.handles)
    assert first == second != other
    assert first.endswith("/x") and other.endswith("/x")
    owners = [handle.request.text_owner for handle in shared.dispatcher.handles]
    assert owners[0] == owners[1] != owners[2]
