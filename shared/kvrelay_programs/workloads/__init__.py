"""Programs with the shapes of published workloads (Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs", 2024, section 6 and appendix C). Their texts are random sentences, so any model can run them.
"""

from kvrelay_programs.workloads.workload import Workload, find_workload, workloads

__all__ = ["Workload", "find_workload", "workloads"]
