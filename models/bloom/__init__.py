"""BLOOM: decoders whose positions enter by ALiBi."""
