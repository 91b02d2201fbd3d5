"""Recovery after the death of a client, consistency checks, and listings of the tables."""
