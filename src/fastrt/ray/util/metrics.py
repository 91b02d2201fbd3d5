"""`ray.util.metrics`: metrics of a program, which `fastrt metrics` shows."""

from fastrt.util.metrics import Counter, Gauge, Histogram, Metric

__all__ = ["Counter", "Gauge", "Histogram", "Metric"]
