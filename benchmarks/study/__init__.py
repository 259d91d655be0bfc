"""The parts of benchmarks/sample_efficiency.py: tasks, a model with seeds on a leading axis, the loop, the report."""
