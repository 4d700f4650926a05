"""The command line: `kvx verify` and `kvx bench pd`."""
