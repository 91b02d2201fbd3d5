"""`get_node_ip_address` in the place where many programs look for it, such as Modin and trainers of language models."""

from __future__ import annotations

from fastrt.ray.util.addresses import get_node_ip_address

__all__ = ["get_node_ip_address"]
