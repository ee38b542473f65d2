"""bench_step.py and bench_graph_step.py: a decode step with its state, by several programs."""
