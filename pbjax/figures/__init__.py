"""Pictures and pages of plain data; nothing is computed here."""
