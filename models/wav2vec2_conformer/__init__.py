"""wav2vec2-conformer: a Conformer on raw audio."""
