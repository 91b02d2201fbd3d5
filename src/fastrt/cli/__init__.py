"""The `fastrt` command: its subcommands use the public API, as users' programs do, and inspect running sessions."""
