"""The fleet's prefix index: which worker holds which blocks. Redis has the truth, routers have replicas."""

from kvrelay.fleet.index.feed import FeedState, IndexFeed
from kvrelay.fleet.index.publisher import IndexPublisher
from kvrelay.fleet.index.reader import IndexReader
from kvrelay.fleet.index.replica import IndexReplica

__all__ = ["FeedState", "IndexFeed", "IndexPublisher", "IndexReader", "IndexReplica"]
