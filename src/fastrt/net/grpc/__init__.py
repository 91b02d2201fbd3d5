"""gRPC plumbing: descriptor sets, a server, channels and tokens. It knows no service."""

from fastrt.net import packages

packages.check()
