"""A step that carries state, split once and held in pieces; its sub-batches interleaved."""
