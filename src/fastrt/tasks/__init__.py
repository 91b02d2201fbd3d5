"""The driver's side of tasks: remote functions, submission, cancellation."""
