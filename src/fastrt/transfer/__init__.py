"""Objects between nodes: early Ray's ObjStore over gRPC for everyone, a native TCP stream between fastrt's stores."""
