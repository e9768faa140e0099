"""What runs in a step: sequences, their blocks, and the policy. Pure: no I/O, no clock, no tensor."""
