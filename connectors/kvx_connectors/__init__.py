"""Adapters from kvx to transfer libraries: one file each, and nothing else imports their SDKs."""
