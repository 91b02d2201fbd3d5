"""Transfer of objects: chunks for gRPC streams, TCP sockets, and the TCP connections of this process."""
