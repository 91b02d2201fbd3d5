"""Helpers of several test files: nodes, network namespaces, environments with other libraries, attackers."""
