"""What the scripts measure; each script holds its options, and one module here the work.

They are run from the scripts' folder (`python scripts/bench_search.py`), which is then on the path.
"""
