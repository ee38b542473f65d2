"""Which program runs: candidates compiled, verified, timed in turn, and one kept."""
