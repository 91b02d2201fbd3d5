"""Network protocols: servers, channels, identities and their proofs."""
