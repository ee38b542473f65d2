"""Where the batch lies in every value of a graph, or the operation that mixes its rows."""
