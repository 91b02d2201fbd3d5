"""A node's part in a cluster: the uplink process of each node, and the head process, which keeps the members."""
