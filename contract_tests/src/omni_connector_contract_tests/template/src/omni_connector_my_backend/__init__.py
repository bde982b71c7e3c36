"""The my_backend backend of omni-connector."""
