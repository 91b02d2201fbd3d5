"""What fastrt speaks over the network."""
