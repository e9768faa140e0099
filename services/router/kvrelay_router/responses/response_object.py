"""The response object, which the answer is, and which the events of a stream carry."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.responses_request import ResponsesRequest

Keep = Callable[[dict[str, Any]], Awaitable[bool]]
"""Stores a response at its end. Returns whether it did."""


class ResponseObject:
    """The fields that do not change, and those of each state."""

    def __init__(self, unique: str, request: ResponsesRequest, run: PromptRun, keep: Keep | None) -> None:
        """`keep`: None if the response is not to be stored."""
        self._run, self._keep = run, keep
        sampling = run.request.sampling
        self._head: dict[str, Any] = {
            "id": f"resp_{unique}",
            "object": "response",
            "created_at": int(time.time()),
        }
        self._fields: dict[str, Any] = {
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": request.text_format},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def begun(self) -> dict[str, Any]:
        return self._object("in_progress", [])

    async def ended(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The object with its output, which is stored before the client gets it. A text that was cut makes it
        incomplete. `store` is false if the response could not be stored."""
        reason = {"incomplete_details": {"reason": "max_output_tokens"}} if self.was_cut else {}
        response = self._object(self.status, output, usage=self._usage(), **reason)
        if self._keep is not None:
            response["store"] = await self._keep(response)
        return response

    def failed(self, code: str, message: str) -> dict[str, Any]:
        return self._object("failed", [], error={"code": code, "message": message})

    @property
    def was_cut(self) -> bool:
        (choice,) = self._run.choices
        return choice.finish_reason == "length"

    @property
    def status(self) -> str:
        """Final status of the response, and of its last item."""
        return "incomplete" if self.was_cut else "completed"

    def _object(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        fields = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return {**self._head, **fields, **self._fields, **more}

    def _usage(self) -> dict[str, Any]:
        (choice,) = self._run.choices
        num_prompt = len(self._run.request.prompt_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._run.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens or 0},
            "total_tokens": num_prompt + choice.num_tokens,
        }
