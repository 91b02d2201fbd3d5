"""A folder for the module path, where `import ray` finds fastrt: see `fastrt.ray.alias`."""
