"""Configuration: one frozen typed object per process, from a file, the environment and flags."""

from kvrelay.config.common import CommonConfig
from kvrelay.config.loader import ConfigError, load_config
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig

__all__ = ["CommonConfig", "ConfigError", "RouterConfig", "WorkerConfig", "load_config"]
