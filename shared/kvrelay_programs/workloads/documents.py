"""Answers from documents, and facts from documents as JSON."""

from __future__ import annotations

import random
from typing import Any

from kvrelay_programs.expressions import gen
from kvrelay_programs.program import program
from kvrelay_programs.state import State
from kvrelay_programs.workloads.sentences import sentence, text
from kvrelay_programs.workloads.workload import Workload

NUM_DOCUMENTS = 12
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "house": {"enum": ["north", "south", "east", "west"]},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "is_alive": {"type": "boolean"},
    },
    "required": ["name", "house", "year_of_birth", "is_alive"],
    "additionalProperties": False,
}


@program
def retrieval(s: State, documents: str, question: str) -> None:
    """A question behind the documents that a search has found."""
    s += f"{documents}\nQuestion: {question}\nAnswer:" + gen("answer", 48)


@program
def json_extraction(s: State, document: str) -> None:
    """Facts of a document by a schema."""
    s += f"{document}\nThe facts as JSON: " + gen("facts", 120, json_schema=SCHEMA)


def _retrieval(shared: random.Random, own: random.Random) -> dict[str, Any]:
    store = [text(shared, 200) for _ in range(NUM_DOCUMENTS)]
    weights = [1 / (1 + rank) for rank in range(NUM_DOCUMENTS)]  # some are found more often, and the best comes first
    found = sorted(set(own.choices(range(NUM_DOCUMENTS), weights, k=3)))
    return {"documents": "\n\n".join(store[number] for number in found), "question": sentence(own, 12)}


def _json(shared: random.Random, own: random.Random) -> dict[str, Any]:
    return {"document": text(own, 150)}


WORKLOADS = (
    Workload("rag", "popular documents, by programs", retrieval, _retrieval),
    Workload("json", "nothing but the schema", json_extraction, _json),
)
