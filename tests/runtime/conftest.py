"""Lets gRPC open what it keeps open for good."""

import support.grpc_opened  # noqa: F401
