"""The prefill service: computes prompts and hands them over."""
