"""The prefix of resources that stand for a type of accelerator, where programs of older versions of Ray look for it."""

__all__ = ["RESOURCE_CONSTRAINT_PREFIX"]

RESOURCE_CONSTRAINT_PREFIX = "accelerator_type:"
