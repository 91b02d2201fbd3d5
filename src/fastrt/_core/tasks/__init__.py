"""Task records and the calls of actors: submission, admission, execution, cancellation."""
