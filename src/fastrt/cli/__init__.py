"""The `fastrt` command: programs that use the public API as a user's would, and look into running sessions."""
