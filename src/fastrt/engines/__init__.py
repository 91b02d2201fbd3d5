"""Alternative engines that run a program in place of fastrt's own: this process alone, or a Ray cluster."""
