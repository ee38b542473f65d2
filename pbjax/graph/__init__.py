"""A call as a flat graph of operations, what each costs, and which unit of the device bounds it."""
