"""Programs with the shapes of published workloads (Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs", 2024, section 6 and appendix C). Their texts are random sentences, so any model can run them.
"""

from kvrelay_programs.workloads import agents, chat, choice, documents, thought
from kvrelay_programs.workloads.workload import Workload

__all__ = ["Workload", "find_workload", "workloads"]


def workloads() -> dict[str, Workload]:
    """All workloads, in the order of the docs."""
    modules = (choice, chat, thought, agents, documents)
    return {workload.name: workload for module in modules for workload in module.WORKLOADS}


def find_workload(name: str) -> Workload:
    """Raises ValueError, which lists the names."""
    known = workloads()
    if name not in known:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(known)}")
    return known[name]
