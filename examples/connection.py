"""The server of the examples: `KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) name it."""

from __future__ import annotations

import os

from openai import APIConnectionError, APIStatusError, OpenAI

URL = os.environ.get("KVRELAY_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("KVRELAY_API_KEY", "none")


def connect() -> tuple[OpenAI, str]:
    """A client, and the name of the first model that is served. Ends the program with one line if there is none."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    try:
        return client, client.models.list().data[0].id
    except APIConnectionError:
        raise SystemExit(f"nothing answers at {URL}: start a server with `make serve`, or set KVRELAY_URL") from None
    except APIStatusError as error:
        raise SystemExit(f"{URL} refuses: {error.response.text} (KVRELAY_API_KEY is the key)") from None
