"""What can run a program in the place of fastrt's own engine: this process alone, or a Ray cluster."""
