"""Split, timetable, predicted seconds, search: plain Python on plain data, without JAX."""
