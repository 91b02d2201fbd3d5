# Functions for the other compiled modules only; see the .pxd beside this file.
