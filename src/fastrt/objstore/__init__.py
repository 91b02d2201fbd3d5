"""Early Ray's ObjStore service over this node's store."""
