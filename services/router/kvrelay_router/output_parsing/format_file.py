"""A tool format from a Python file of the operator."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvrelay_router.output_parsing.events import ContentText
from kvrelay_router.output_parsing.formats import ToolFormat

SUFFIX = ".py"
VARIABLE = "FORMAT"
_PROBE = "An otter is a mammal."


class BadFormatFile(ValueError):
    """The file cannot be used. The message has the reason."""


def load_tool_format(path: str) -> ToolFormat:
    """Executes the file and returns its `FORMAT`. Raises BadFormatFile."""
    spec = importlib.util.spec_from_file_location(f"kvrelay_tool_format_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise BadFormatFile(f"tool parser {path}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadFormatFile(f"tool parser {path}: {type(error).__name__}: {error}") from error
    found = getattr(module, VARIABLE, None)
    if not isinstance(found, ToolFormat):
        raise BadFormatFile(
            f"tool parser {path}: {VARIABLE} must be a kvrelay_router.output_parsing.formats.ToolFormat, "
            f"not {type(found).__name__}"
        )
    _check_parser(path, found)
    return found


def _check_parser(path: str, found: ToolFormat) -> None:
    """Text without calls must come back as content."""
    try:
        parser = found.new_parser([])
        events = [*parser.feed(_PROBE), *parser.finish()]
    except Exception as error:
        raise BadFormatFile(f"tool parser {path}: its parser raised {type(error).__name__}: {error}") from error
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    if content != _PROBE:
        raise BadFormatFile(f"tool parser {path}: its parser made {content!r} of {_PROBE!r}, which has no calls")
