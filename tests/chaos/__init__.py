"""The chaos run: real brokers, cache and workers under a seeded schedule of faults, and what became of every ticket."""
