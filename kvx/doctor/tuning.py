"""Settings that are allowed and still absurd, and secrets that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvx.curve import Curve, read_curve
from kvx.doctor.findings import Finding, error, ok, warning
from kvx.engine_side import HandoffSettings
from kvx.errors import ConnectorError
from kvx.secret import FILE, VALUE, Secret, read_secret

# A lease is renewed at a third of it: shorter than this, one pause of a busy machine or network ends the hand-off.
LEAST_LEASE_S, SHORT_LEASE_S = 1.0, 5.0
# As long does prefill keep the blocks of a reader that died.
LONG_LEASE_S = 600.0
LEAST_WINDOW_S, LONG_WINDOW_S = 1.0, 300.0


def check_leases(settings: HandoffSettings) -> Finding:
    lease, grace, hold = settings.lease_s, settings.grace_s, settings.max_hold_s
    text = f"lease_s {lease:g}, grace_s {grace:g}, max_hold_s {hold:g}"
    default = HandoffSettings.lease_s
    if lease < SHORT_LEASE_S:
        make = error if lease < LEAST_LEASE_S else warning
        return make(
            "leases", text,
            f"decode renews at a third of the lease, every {lease / 3:.3g} s: one pause of a busy machine that is "
            "longer frees the blocks under it, and the prompt is computed again",
            f"lease_s of at least {SHORT_LEASE_S:g} s; the default is {default:g}",
        )  # fmt: skip
    if hold < lease:
        return warning(
            "leases", text, "max_hold_s is shorter than the lease, so that no hold can be renewed even once",
            f"max_hold_s of at least {lease:g}; the default is {HandoffSettings.max_hold_s:g}",
        )  # fmt: skip
    if lease > LONG_LEASE_S:
        return warning(
            "leases",
            text,
            f"when a decode engine dies, its blocks stay taken on prefill for {(lease + grace) / 60:.0f} minutes",
            f"lease_s of at most {LONG_LEASE_S:g}; the default is {default:g}",
        )
    return ok("leases", text)


def check_window(settings: HandoffSettings, secret: Secret | None) -> Finding:
    window = settings.auth_window_s
    if secret is None:
        return ok("authentication", "no secret here: messages are not signed (docs/security.md)")
    if window < LEAST_WINDOW_S:
        return error(
            "authentication", f"auth_window_s is {window:g}",
            "a signed message that takes longer than that to be read, or clocks that far apart, are refused",
            f"leave auth_window_s at its default, {HandoffSettings.auth_window_s:g}",
        )  # fmt: skip
    if window > LONG_WINDOW_S:
        return warning(
            "authentication", f"auth_window_s is {window:g}", "a message that was seen on the way can be shown to "
            "another engine for so long", f"leave auth_window_s at its default, {HandoffSettings.auth_window_s:g}",
        )  # fmt: skip
    return ok("authentication", f"messages are signed, within {window:g} s")


def read_keys(environ: Mapping[str, str] = os.environ) -> tuple[Secret | None, Curve | None, Finding | None]:
    """The secret and the CURVE keys, and what is wrong with either."""
    try:
        secret = read_secret(environ)
        return secret, read_curve(secret, environ), None
    except ConnectorError as problem:
        return None, None, error(
            "secret", str(problem), "an engine with it refuses to start",
            f"one file of 16 to 4096 bytes, mode 0600, the same on every host, named by {FILE} (and no {VALUE})",
        )  # fmt: skip
