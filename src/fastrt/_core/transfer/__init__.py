"""Objects in chunks and over TCP, and the TCP connections of this process."""
