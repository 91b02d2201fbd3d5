"""A node's part in a cluster, the uplink's process, and the head, which knows the nodes that are there."""
