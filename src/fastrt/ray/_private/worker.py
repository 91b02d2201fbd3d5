"""Settings of Ray's worker that libraries change although they are not public. They change nothing here."""

blocking_get_inside_async_warned = False  # Daft sets it: Ray warns of a `get` inside of an asynchronous actor
