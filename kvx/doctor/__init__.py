"""`kvx doctor`: what breaks prefill/decode deployments, found before the first request."""
