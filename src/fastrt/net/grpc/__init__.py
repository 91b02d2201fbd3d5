"""gRPC plumbing: descriptor sets, a server, channels and tokens. It knows no service."""
