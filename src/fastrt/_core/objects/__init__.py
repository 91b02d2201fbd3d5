"""The object table: values, the references between them, and the structures that are stored as objects."""
