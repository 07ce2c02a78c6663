"""Commands that take ports and return results; they never print."""
