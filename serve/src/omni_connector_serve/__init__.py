"""Serving for omni-modal pipelines: a command line, a stage runtime, a reference pipeline and engine adapters.

Nothing is imported here, so that ``omni-connector backends`` stays light; import the part that you need.
"""
