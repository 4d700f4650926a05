"""Memory drivers: one file a device kind, one interface (`base.Driver`)."""
