"""The in-process reference backend."""
