"""Texts, images and audio in; tokens, vectors and labels out."""
