"""Transfer of objects between nodes over a native TCP stream, and the form of values in early Ray's ObjStore."""
