"""A graph as prologue, repeated block and epilogue: layers, their stages, and a summary of both."""
