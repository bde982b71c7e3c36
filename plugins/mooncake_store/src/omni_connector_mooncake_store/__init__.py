"""omni-connector over the Mooncake Store."""
