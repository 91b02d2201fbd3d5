"""`ray.cloudpickle`: the package `cloudpickle`, which fastrt pickles by, too."""

from cloudpickle import CloudPickler, Pickler, dump, dumps, load, loads, register_pickle_by_value

__all__ = ["CloudPickler", "Pickler", "dump", "dumps", "load", "loads", "register_pickle_by_value"]
