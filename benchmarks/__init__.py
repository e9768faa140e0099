"""What measures. Each script runs by itself."""
