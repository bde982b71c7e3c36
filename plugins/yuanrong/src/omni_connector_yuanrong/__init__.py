"""omni-connector over openYuanrong datasystem: a store whose worker keeps payloads in memory shared with its host."""
