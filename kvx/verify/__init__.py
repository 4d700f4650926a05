"""Byte-identity runs: the same questions to one stock server and to a prefill/decode pair, compared token by token."""
