"""The command ``omni-connector``, as ``python -m omni_connector_serve``."""

from omni_connector_serve.cli import main

main()
