"""Diagrams of the pages."""

from sphinx.application import Sphinx


def setup(app: Sphinx) -> None:
    return None
