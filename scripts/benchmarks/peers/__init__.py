"""bench_peers.py: rows of models and kernels, timed by our processes and by peers'.

`run` starts the processes (`*_process`), which share `rows`, `protocol` and `scenarios`; `results`
writes the tables.
"""
