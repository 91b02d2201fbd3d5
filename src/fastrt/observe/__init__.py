"""What shows a running system to people: it reads and measures, and decides nothing."""
