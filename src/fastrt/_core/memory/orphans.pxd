# Nothing here is for other compiled modules.
