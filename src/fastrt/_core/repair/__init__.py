"""Recovery after the death of a client, consistency checks, and rows for people to read."""
