"""Packages that clusters and services need and one machine does not: a light installation leaves them out."""

from importlib.util import find_spec

_NAMES = {  # the name in imports -> the name for pip
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "google.protobuf": "protobuf",
}


_EXTRAS = {"prometheus_client": "metrics", "opentelemetry": "otlp"}  # by the name in imports


def advice(missing: str | None) -> str | None:
    """Say what to install if `missing` is the import name of such a package or of a part of it; else None."""
    extra = _EXTRAS.get((missing or "").partition(".")[0])
    if extra is not None:
        return f"this needs a package that is not installed; run: pip install 'fastrt[{extra}]'"
    if missing is None or not any(f"{missing}.".startswith(f"{name.partition('.')[0]}.") for name in _NAMES):
        return None
    absent = [package for name, package in _NAMES.items() if not _is_installed(name)]
    return f"clusters and services need packages that are not installed; run: pip install {' '.join(absent)}"


def is_of_services(package: str) -> bool:
    """Whether only clusters and services need this package, named as for pip."""
    return package in _NAMES.values()


def are_installed() -> bool:
    """Whether all packages of clusters and services are installed."""
    return all(_is_installed(name) for name in _NAMES)


def check() -> None:
    """Check that they are installed.

    Raises:
        ModuleNotFoundError: one is missing; the text says what to install.
    """
    for name in _NAMES:
        if not _is_installed(name):
            raise ModuleNotFoundError(advice(name), name=name)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is a part of
        return False
