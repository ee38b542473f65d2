"""LASR: a Conformer with rotary positions on mel spectrograms."""
