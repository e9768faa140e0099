"""`kvrelay bench`: a load on any OpenAI-compatible endpoint, and what its clients would have felt."""
