"""The page `/docs`: endpoints and their fields, with a form that sends a request. Needs nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parent / "api_page.html"
EXAMPLES = {
    "/v1/chat/completions": '{"model": "MODEL", "messages": [{"role": "user", "content": "What is an otter?"}]}',
    "/v1/completions": '{"model": "MODEL", "prompt": "An otter is", "max_tokens": 16}',
    "/v1/responses": '{"model": "MODEL", "input": "What is an otter?"}',
    "/v1/messages": (
        '{"model": "MODEL", "max_tokens": 64, "messages": [{"role": "user", "content": "What is an otter?"}]}'
    ),
    "/v1/select": '{"model": "MODEL", "prompt": "An otter is", "choices": [" a bird.", " a mammal."]}',
    "/tokenize": '{"model": "MODEL", "prompt": "An otter"}',
    "/detokenize": '{"model": "MODEL", "tokens": [7, 8]}',
}
"""Bodies to begin with, by path."""


def api_page(schema: Mapping[str, Any], model: str) -> bytes:
    """The page for an OpenAPI schema. `model`: the name in the examples."""
    sections = []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            sections.append(_section(path, method.upper(), operation, model))
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("<!-- endpoints -->", "\n".join(sections)).encode()


def _section(path: str, method: str, operation: Mapping[str, Any], model: str) -> str:
    about = escape((operation.get("description") or "").split("\n")[0])
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    example = EXAMPLES.get(path, "{}").replace("MODEL", json.dumps(model)[1:-1]) if method == "POST" else ""
    attributes = f'data-method="{method}" data-path="{escape(path, quote=True)}"'
    parts = [f"<details {attributes}><summary><b>{method}</b> <code>{escape(path)}</code> {about}</summary>"]
    if body is not None:
        parts += ["<table><thead><tr><th>Field</th><th>Type</th><th>Default</th><th>Meaning</th></tr></thead><tbody>"]
        parts += [*_rows(body), "</tbody></table>"]
    if "{" in path:
        parts.append(f'<label>Path <input class="path" value="{escape(path, quote=True)}"></label>')
    if method == "POST":
        parts.append(f'<textarea rows="4" spellcheck="false">{escape(example)}</textarea>')
    parts.append("<button>Send</button><pre hidden></pre></details>")
    return "".join(parts)


def _rows(schema: Mapping[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else escape(repr(field["default"])) if "default" in field else ""
        cells = (f"<code>{escape(name)}</code>", escape(_type(field)), default, escape(field.get("description") or ""))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _type(field: Mapping[str, Any]) -> str:
    """A short form of a field's type."""
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    for name in ("anyOf", "oneOf", "allOf"):
        if name in field:
            return " or ".join(dict.fromkeys(_type(each) for each in field[name] if each.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {})) or 'anything'}"
    return str(field.get("type", ""))
