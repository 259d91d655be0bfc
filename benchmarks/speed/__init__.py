"""What the speed benchmarks share: the work, the two sides that do it, the clock, the tables."""
