"""`ray.util.joblib.register_ray`: joblib's work on fastrt, by the backend "ray"."""

from __future__ import annotations

__all__ = ["register_ray"]


def register_ray() -> None:
    """Register the backend for `joblib.parallel_backend("ray")`.

    Source:
        The semantics of `ray.util.joblib.register_ray`.
    """
    from joblib.parallel import register_parallel_backend

    from fastrt.joblib import FastrtBackend

    register_parallel_backend("ray", FastrtBackend)
