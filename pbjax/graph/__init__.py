"""A call as a flat graph of operations, with the cost of each and the resource that bounds it."""
