"""Conformer: encoders of frames, the middle of other models of audio."""
