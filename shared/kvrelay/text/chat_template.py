"""Renders messages to a prompt with the model's chat template, in jinja's sandbox, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Template variables that a request's `chat_template_kwargs` cannot set."""

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the final message's text. The rendered prompt is cut where the tag begins."""

PROBE = "kvrelay role probe"

PROBE_CHATS: dict[str, list[str]] = {
    "system": ["system", "user"],
    "assistant": ["user", "assistant", "user"],
    "tool": ["user", "assistant", "tool"],
}
"""The shortest usual conversation with each role. Rendering it shows whether the template drops that role."""


class ChatTemplateError(Exception):
    """The template refuses these messages or fails to render them."""


class _GenerationBlocks(Extension):
    """Renders the body of `{% generation %}` blocks, which only mark text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it like this

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        text: str = caller()
        return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja's own filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. Rendering is pure Python and may take long: call it off the event loop."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error
        # Each render copies the globals, which takes ten times as long from jinja's ChainMap.
        self._template.globals = dict(self._template.globals)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._takes_parts = self._try_parts()
        self._dropped_roles = frozenset(role for role in PROBE_CHATS if self._drops(role))

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The prompt's text, special tokens included. Raises ChatTemplateError."""
        prepared = [self._prepare(message) for message in messages]
        final_text = self._tag_final(prepared) if continue_final_message else None
        variables = {"add_generation_prompt": add_generation_prompt, "tools": tools or None, **(template_kwargs or {})}
        text = self._render(prepared, variables)
        return text if final_text is None else _cut_at_tag(text, final_text)

    def between_turns(self) -> str:
        """What the template writes around the turns of a conversation, without a generation prompt."""
        rendered = []
        for chat in (*PROBE_CHATS.values(), ["user"]):
            try:
                rendered.append(self._render([{"role": role, "content": PROBE} for role in chat], {}))
            except ChatTemplateError:
                continue  # it has no place for one of these roles
        return "\n".join(rendered)

    def _prepare(self, message: Message) -> Message:
        """A copy without empty fields; `developer` becomes `system` if the template does not mention it."""
        prepared = {key: value for key, value in message.items() if value is not None}
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if prepared["role"] in self._dropped_roles:
            raise ChatTemplateError(f"the model's chat template has no place for the role '{message['role']}'")
        if isinstance(message.get("content"), list) and not self._takes_parts:
            prepared["content"] = "\n".join([part["text"] for part in message["content"]])
        return prepared

    def _tag_final(self, messages: list[Message]) -> str:
        content = messages[-1].get("content")
        if isinstance(content, str):
            messages[-1]["content"] = content + CONTINUE_TAG
            return content
        if not content:
            raise ChatTemplateError("the final message has no text to continue")
        final_text: str = content[-1]["text"]
        messages[-1]["content"] = [*content[:-1], {**content[-1], "text": final_text + CONTINUE_TAG}]
        return final_text

    def _render(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(
                {"messages": messages, "tools": None, "documents": None, **self._special_tokens, **variables}
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error

    def _try_parts(self) -> bool:
        """True if the template iterates over the parts of a content. Otherwise they are joined by newlines for it."""
        parts = [{"type": "text", "text": PROBE}, {"type": "text", "text": PROBE}]
        try:
            text = self._render([{"role": "user", "content": parts}], {"add_generation_prompt": True})
        except ChatTemplateError:
            return False
        return text.count(PROBE) == 2 and str(parts) not in text and "'text'" not in text

    def _drops(self, role: str) -> bool:
        """True if the template drops messages of this role silently. If it raises, it also raises in `render`."""
        chat = [{"role": each, "content": PROBE if each == role else "x"} for each in PROBE_CHATS[role]]
        try:
            return PROBE not in self._render(chat, {"add_generation_prompt": True})
        except ChatTemplateError:
            return False


def _cut_at_tag(text: str, final_text: str) -> str:
    """The rendered prompt up to the end of the final message's text. Some templates strip that text."""
    position = text.rfind(CONTINUE_TAG.strip())
    if position < 0 or final_text.strip() not in text:
        raise ChatTemplateError("the chat template does not keep the final message's text, so it cannot be continued")
    kept_spaces = text.startswith(CONTINUE_TAG, position)
    return text[:position] if kept_spaces else text[:position].rstrip()
