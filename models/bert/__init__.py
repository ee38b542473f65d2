"""BERT: encoders of text."""
