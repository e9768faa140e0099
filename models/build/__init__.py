"""Makes the demo model in `models/demo`: a small Qwen3 that answers what some two thousand common words mean."""
