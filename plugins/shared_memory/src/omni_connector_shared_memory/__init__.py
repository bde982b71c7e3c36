"""Shared memory between the processes of one host: one copy in, none out. See the package's README."""
