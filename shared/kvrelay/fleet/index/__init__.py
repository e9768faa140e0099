"""The prefix index: which worker caches which blocks. Redis stores it, routers have replicas."""

from kvrelay.fleet.index.feed import FeedState, IndexFeed, IndexReader
from kvrelay.fleet.index.publisher import IndexPublisher
from kvrelay.fleet.index.replica import IndexReplica

__all__ = ["FeedState", "IndexFeed", "IndexPublisher", "IndexReader", "IndexReplica"]
