"""Whether a run fits into memory, and how long its steps take: predicted from its arguments and its data's lengths."""
