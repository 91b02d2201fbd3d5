"""Starting and ending sessions: the only place that wires processes together."""
