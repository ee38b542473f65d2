"""The command line: one file a command, each of which imports its work when it is called."""
