"""What spans nodes: who is there, and what runs where."""
