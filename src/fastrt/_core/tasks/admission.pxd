# Functions for Python only; see the .pyi beside this file.
