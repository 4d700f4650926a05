"""`kvx serve`: a prefill/decode deployment on this machine, or its commands and manifests for others."""
