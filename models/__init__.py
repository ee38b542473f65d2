"""Transformer families as Flax nnx modules, loaded from Hugging Face folders."""
