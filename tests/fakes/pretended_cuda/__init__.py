"""A CUDA device that is none, for builds of torch without CUDA: kvrelay's own device code runs on it as it is.

Its tensors say that they are on `cuda:N`, and their bytes lie in the CPU's memory. It is as strict as a GPU, and as
late: what is launched waits in its stream until somebody waits for it, so a wait that is missing gives wrong numbers,
and one that hides is written down. See `gpu` for the order of work, `tensor` for what an op may be given, `host` for
copies and pinned memory, `api` for what stands in for `torch.cuda`.
"""

from tests.fakes.pretended_cuda.api import NO_PRETENCE, pretend_cuda
from tests.fakes.pretended_cuda.gpu import Machine, Stream, machine
from tests.fakes.pretended_cuda.tensor import DeviceTensor, launch

__all__ = ["NO_PRETENCE", "DeviceTensor", "Machine", "Stream", "launch", "machine", "pretend_cuda"]
