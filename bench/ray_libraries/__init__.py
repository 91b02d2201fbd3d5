"""Programs of other libraries that `compare_ray_libraries.py` runs on fastrt and on Ray."""
