"""Tools that show a running system to people: they read and measure, and decide nothing."""
