"""What the processes tell about themselves."""
