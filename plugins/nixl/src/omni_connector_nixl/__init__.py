"""NIXL as a backend of omni-connector; see `omni_connector_nixl.transport`."""
