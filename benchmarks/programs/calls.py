"""Endpoints that make programs' calls as raw API calls, or keep them; and what a cache could have done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay_programs import Endpoint
from kvrelay_programs.content import Content, num_common
from kvrelay_programs.endpoint import Caller
from kvrelay_programs.expressions import Select
from kvrelay_programs.results import Selected
from kvrelay_programs.scoring import ScoredTokens

BLOCK_SIZE = 16
ROOT = root_hash(model="benchmark")


@dataclass(frozen=True, slots=True)
class Call:
    """One prompt of a request. Without `has_generation_prompt`, `messages` are continued or end as they stand.
    `first_scored`: position of the first token whose log-probability was asked for. `number`: its place in the request.
    `output` has the tokens of the answer as they were sampled: its text may have others. `choices` of a selection stand
    behind the prompt.
    """

    text: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] = ()
    is_continued: bool = False
    has_generation_prompt: bool = True
    first_scored: int | None = None
    number: int = 0
    output: Sequence[int] = ()
    choices: Sequence[str] = ()


class KeptCalls(Endpoint):
    """Keeps each request in the order in which they are sent, with its answer. `salt` is the `cache_salt` of all, so
    that runs with the same texts on one server do not find each other's blocks.
    """

    def __init__(self, base_url: str, model: str) -> None:
        super().__init__(base_url, model=model)
        self.salt = ""
        self._sent: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []

    async def _post(self, path: str, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if path != "/tokenize":
            body = {**body, "cache_salt": self.salt} if self.salt else body
            if body.get("max_tokens") != 0 and path != "/v1/select":
                body = {**body, "return_token_ids": True}
            self._sent.append((path, body, answer))
        answer |= await super()._post(path, body, caller)
        return answer

    def take_calls(self) -> list[Call]:
        """The calls since the last time."""
        sent, self._sent = self._sent, []
        return [call for path, body, answer in sent for call in _calls_of(path, body, answer)]


class RawCalls(KeptCalls):
    """What a script of raw API calls does: no session and no hints, and a request for each choice of a select."""

    async def prefetch(self, content: Content, caller: Caller) -> None:
        pass

    async def end_session(self, session: str) -> None:
        pass

    async def select(self, content: Content, step: Select, caller: Caller) -> Selected:
        return await self._by_prompts(content, step, caller)

    async def _post(self, path: str, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        return await super()._post(path, body, Caller("", caller.time_left_s, caller.usage))

    async def _scores(self, prompts: list[str] | list[list[int]], first: int, caller: Caller) -> list[ScoredTokens]:
        each = [super(RawCalls, self)._scores(prompts[at : at + 1], 1, caller) for at in range(len(prompts))]
        return [row for rows in await asyncio.gather(*each) for row in rows]


def _calls_of(path: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> list[Call]:
    sampled = {int(choice["index"]): choice.get("token_ids", ()) for choice in answer.get("choices", ())}
    if "messages" in body:
        call = Call(
            messages=body["messages"],
            is_continued=body.get("continue_final_message", False),
            has_generation_prompt=body.get("add_generation_prompt", True),
            output=sampled.get(0, ()),
            choices=body.get("choices", ()),
        )
        return [call, *_unconditional(body)]
    if path == "/v1/select":
        return [Call(text=body["prompt"], choices=body["choices"]), *_unconditional(body)]
    first = body.get("logprob_start_len") if "prompt_logprobs" in body else None
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [
        Call(
            text=prompt if isinstance(prompt, str) else "",
            token_ids=() if isinstance(prompt, str) else prompt,
            first_scored=first,
            number=number,
            output=sampled.get(number, ()),
        )
        for number, prompt in enumerate(prompts)
    ]


def _unconditional(body: Mapping[str, Any]) -> list[Call]:
    if body.get("normalization") != "unconditional":
        return []
    return [Call(text=body["unconditional_prompt"], choices=body["choices"])]


@dataclass(frozen=True, slots=True)
class TokenizedCall:
    """`hashes` are of the blocks of prompt and answer, without the last token, whose KV is not computed.
    `num_prompt`: the prompt's tokens as the server's usage counts them. `num_reusable`: the most of them that a cache
    can have. `num_shared`: those of them that an earlier prompt of the same request has, too, if all are only scored:
    they need not fill blocks."""

    num_prompt: int
    num_reusable: int
    hashes: Sequence[BlockHash]
    num_shared: int = 0


def tokenized(calls: Sequence[Call], tokenizer: Any) -> list[TokenizedCall]:
    """Tokens of prompts and answers, as this tokenizer of `transformers` gives them."""
    found: list[TokenizedCall] = []
    scored: list[list[int]] = []  # the prompts of the newest request
    for call in calls:
        if call.choices:
            found += _selection(call, tokenizer)
            continue
        prompt, each = _tokenized(call, tokenizer)
        if not call.number:
            scored = []
        if call.first_scored is not None:
            scored.append(prompt)
        if len(scored) > 1:
            each = replace(each, num_shared=_num_shared(scored, call.first_scored or 0))
        found.append(each)
    return found


def _num_shared(prompts: Sequence[list[int]], first_scored: int) -> int:
    others = [num_common(prompts[0], prompt) for prompt in prompts[1:]]
    common = min(*others, min(map(len, prompts)) - 1)
    return max(0, min(common, max(first_scored, common) - 1))


def _tokenized(call: Call, tokenizer: Any) -> tuple[list[int], TokenizedCall]:
    prompt = list(call.token_ids) or _prompt(call, tokenizer)
    whole = [*prompt, *call.output]
    most = len(prompt) - 1 if call.first_scored is None else min(len(prompt), call.first_scored) - 1
    hashes = hash_blocks(ROOT, whole[: max(len(whole) - 1, len(prompt))], BLOCK_SIZE)
    return prompt, TokenizedCall(len(prompt), max(most, 0) // BLOCK_SIZE * BLOCK_SIZE, hashes)


def _prompt(call: Call, tokenizer: Any, choice: str = "") -> list[int]:
    """The tokens of a prompt, with a choice behind it if there is one."""
    if not call.messages:
        ids: list[int] = tokenizer.encode(call.text + choice)
        return ids
    messages = [dict(message) for message in call.messages]
    if choice and not call.is_continued:
        messages.append({"role": "assistant", "content": choice})
    elif choice:
        messages[-1]["content"] += choice
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=call.has_generation_prompt and not choice,
        continue_final_message=call.is_continued or bool(choice),
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(ids)


def _selection(call: Call, tokenizer: Any) -> list[TokenizedCall]:
    """A prompt for each choice. What all begin with counts in the first one, as the server's usage has it."""
    alone = _prompt(call, tokenizer)
    prompts = [_prompt(call, tokenizer, choice) for choice in call.choices]
    first = max(1, min(num_common(alone, prompt) for prompt in prompts))
    common = min([len(prompt) - 1 for prompt in prompts] + [num_common(prompts[0], each) for each in prompts[1:]])
    found: list[TokenizedCall] = []
    for number, prompt in enumerate(prompts):
        hashes = hash_blocks(ROOT, prompt, BLOCK_SIZE)
        if number:
            found.append(TokenizedCall(len(prompt) - common, 0, hashes))
        else:
            found.append(TokenizedCall(len(prompt), (first - 1) // BLOCK_SIZE * BLOCK_SIZE, hashes))
    return found


def best_possible_hits(calls: Sequence[TokenizedCall]) -> int:
    """Prompt tokens that one cache without end would have for these calls, in their order, if each prompt and answer
    were in it from the moment of the request on."""
    known: set[BlockHash] = set()
    num_hits = 0
    for call in calls:
        held = next((at for at, each in enumerate(call.hashes) if each not in known), len(call.hashes))
        num_hits += max(min(held * BLOCK_SIZE, call.num_reusable), call.num_shared)
        known.update(call.hashes)
    return num_hits
