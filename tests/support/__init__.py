"""What the tests of several files share: nodes, network namespaces, environments with other libraries, attackers."""
