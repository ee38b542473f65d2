"""bench_ablation.py: the programs and searches that it compares, and its figure."""
