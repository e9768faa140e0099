"""Programs of several generation calls over one text, run against an OpenAI endpoint: `gen`, `select`, `fork`.

The server also learns which calls share a prefix, and which belong together.
"""

from kvrelay_programs.endpoint import Endpoint
from kvrelay_programs.errors import DeadlineExceeded, EndpointError, ProgramCancelled, ProgramError
from kvrelay_programs.expressions import assistant, gen, image, select, system, user, video
from kvrelay_programs.graph import Graph, Trace
from kvrelay_programs.program import Program, program
from kvrelay_programs.results import ChoiceScore, Generated, Selected, Usage
from kvrelay_programs.state import Forks, State

__all__ = [
    "ChoiceScore",
    "DeadlineExceeded",
    "Endpoint",
    "EndpointError",
    "Forks",
    "Generated",
    "Graph",
    "Program",
    "ProgramCancelled",
    "ProgramError",
    "Selected",
    "State",
    "Trace",
    "Usage",
    "assistant",
    "gen",
    "image",
    "program",
    "select",
    "system",
    "user",
    "video",
]
