"""`kvrelay bench`: sends a load to any OpenAI-compatible endpoint and measures latencies and throughput."""
