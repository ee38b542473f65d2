"""LLaMA 3, 3.1 and 3.2: decoders of text."""
