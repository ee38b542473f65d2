"""Higher Transformer inference throughput on one GPU by staggered sub-batches."""
