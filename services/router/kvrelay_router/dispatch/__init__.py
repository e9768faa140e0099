"""Runs requests on the workers: attempts, cancellation, deadlines and retries."""
