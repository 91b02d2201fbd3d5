"""Parameter servers. `fastrt.ps.cluster` is their membership."""
