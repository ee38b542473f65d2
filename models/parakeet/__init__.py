"""Parakeet: a Fast Conformer on mel spectrograms."""
