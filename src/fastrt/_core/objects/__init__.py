"""The object table: values, the references between them, and what is kept as an object."""
