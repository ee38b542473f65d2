"""The place of the batch in every value of a graph, or the operation that mixes its rows."""
