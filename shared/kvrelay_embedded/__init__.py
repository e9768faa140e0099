"""The engine of a worker inside your own process: the same scheduler, prefix cache and runner, without services."""

from kvrelay_embedded.engine import Engine
from kvrelay_embedded.llm import LLM
from kvrelay_embedded.outputs import CompletionOutput, RequestOutput, StepOutput, Usage
from kvrelay_embedded.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Engine", "RequestOutput", "SamplingParams", "StepOutput", "Usage"]
