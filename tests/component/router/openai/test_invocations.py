"""POST /invocations answers as the endpoint whose body it gets."""

from __future__ import annotations

from tests.component.router.rig import MODEL, Router


async def test_the_body_decides(router: Router) -> None:
    router.answers("Hm.")
    chat = await router.post("/invocations", model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=9)
    assert chat.json()["object"] == "chat.completion" and chat.json()["choices"][0]["message"]["content"] == "Hm."
    text = await router.post("/invocations", model=MODEL, prompt="x", max_tokens=9)
    assert text.json()["object"] == "text_completion" and text.json()["choices"][0]["text"] == "Hm."
    unnamed = await router.http.post("/invocations", json={"prompt": "x"})
    assert (unnamed.status_code, unnamed.json()["model"]) == (200, MODEL)
    neither = await router.post("/invocations", model=MODEL)
    assert (neither.status_code, neither.json()["error"]["code"]) == (400, "missing_required_parameter")
