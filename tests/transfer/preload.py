"""Imported once by the fork server: engine processes then start in a fraction of a second."""

import torch  # noqa: F401
from nixl._api import nixl_agent  # noqa: F401

import kvx.cache
import kvx.handoff  # noqa: F401
