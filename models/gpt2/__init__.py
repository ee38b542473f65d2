"""GPT-2: decoders of text."""
