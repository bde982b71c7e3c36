"""Run a pipeline: one process per stage and rank, requests over HTTP, payloads over connectors.

A stage is any importable class with `setup` and `process` (see `.stage`); `.orchestrator` starts, watches and feeds the
processes; `.worker` is what runs in them; `.http` is the door.
"""
