"""The functions of `hamilton_graph.py`: Hamilton reads the graph from the names of their arguments."""

import pandas as pd


def mean(spend: pd.Series) -> float:
    """Return the mean of all spending."""
    return float(spend.mean())


def centred(spend: pd.Series, mean: float) -> pd.Series:
    """Return spending without its mean."""
    return spend - mean


def rolling(spend: pd.Series) -> pd.Series:
    """Return the mean of three rows."""
    return spend.rolling(3).mean()


def both(centred: pd.Series, rolling: pd.Series) -> pd.Series:
    """Return the sum of two columns."""
    return centred + rolling


def kind(spend: pd.Series) -> pd.Series:
    """Return spending modulo seven."""
    return spend % 7
