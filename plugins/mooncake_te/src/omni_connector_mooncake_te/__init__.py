"""Mooncake's Transfer Engine as a backend of omni-connector; see `omni_connector_mooncake_te.transport`."""
