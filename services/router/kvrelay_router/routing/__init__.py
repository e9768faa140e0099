"""Who does what: pure functions from a request and the fleet as it is to a decision with its reasons."""
