"""Pictures and pages of plain data; computes nothing."""
