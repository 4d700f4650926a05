"""Every error that kvx raises on purpose. Each message says what was found, what was needed and what to do.

KVXError
 +- LayoutError (ValueError)           a shape, stride, block id or layout that cannot be used
 +- SizingError (ValueError)           too little memory, or sizes that contradict each other
 +- CacheStateError                    a cache call in a state that does not allow it
 +- DriverError                        a memory call failed: `call`, `code`, `name`
 |   +- OutOfDeviceMemory (MemoryError)    the device (or this process's memory limit) has no room for it
 |   +- DriverUnavailable                  the device's library is missing or too old: `hint` says what to do
 +- ConnectorError                     anything a transfer connector could not do
 |   +- ConnectorUnavailable (ImportError)  its library is not installed: `hint` says what to install
 |   +- ConnectorStateError            a connector call in a state that does not allow it
 |   +- PeerMismatch                   the two engines cannot exchange KV: `field`, `ours`, `theirs`
 |   +- Crowded                        one of kvx's queues is full
 |   +- HandshakeError                 the side channel got an unreadable, oversized or refused message
 |   |   +- PeerDead                       the peer's process ended, or closed its connection
 |   |   +- MalformedParams                what a client passed on does not say where a hand-off leads
 |   |   +- StaleGeneration                the peer's memory is not what it was when hands were shaken
 |   +- TransferError                  a transfer failed
 |       +- TicketRefused                  a ticket is missing, forged, or of something else
 |       +- TransferCancelled              the engine asked for its end
 |       +- TransferTimeout (TimeoutError)  no answer before the deadline
 |           +- LeaseExpired                   the owner need not have kept the blocks any longer
 +- EngineError                        an engine process did not start, died, or is not a version kvx knows
 +- ModelError (ValueError)            a model's config.json that nothing can be planned with
 +- DatasetError (ValueError)          a question file is missing or malformed: `line` says where
 +- VerificationError                  answers, digests or counters do not agree
"""

from __future__ import annotations


class KVXError(Exception):
    """Base of all errors of kvx. `cause`: the word under which a hand-off that it ended is counted."""

    cause: str = "other"


class LayoutError(KVXError, ValueError):
    """A shape, stride, block id or layout that cannot be used."""


class SizingError(KVXError, ValueError):
    """Too little memory for what was asked, or sizes that contradict each other."""


class CacheStateError(KVXError):
    """A cache call in a state that does not allow it."""


class DriverError(KVXError):
    """A memory call failed: `call` is its name, `code` its status, `name` the status in words."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call} failed with {name} ({code})" + (f": {detail}" if detail else ""))
        self.call = call
        self.code = code
        self.name = name


class OutOfDeviceMemory(DriverError, MemoryError):
    """The device, or this process's memory limit, has no room for the allocation."""


class DriverUnavailable(DriverError):
    """A device's library is missing, too old, or knows no such device; `hint` says what to do."""

    def __init__(self, call: str, found: str, hint: str) -> None:
        KVXError.__init__(self, f"{call}: {found}; to use the device: {hint}")
        self.call, self.code, self.name = call, 0, found
        self.hint = hint


class ConnectorError(KVXError):
    """Anything that a transfer connector could not do."""


class ConnectorUnavailable(ConnectorError, ImportError):
    """The connector's library is not installed; `hint` says what to install."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; to use it: {hint}")
        self.hint = hint


class ConnectorStateError(ConnectorError):
    """A connector call in a state that does not allow it."""

    cause = "cache_changing"


class Crowded(ConnectorError):
    """One of kvx's queues is full, so that nothing more is taken until some of it has ended."""

    cause = "crowded"


START_ALIKE = "start both engines alike"


class PeerMismatch(ConnectorError):
    """The two engines cannot exchange KV: `field` differs, `ours` here and `theirs` there.

    Where several do, `field` names all of them, and `text` has a line for each.
    """

    cause = "refused"

    def __init__(self, field: str, ours: object, theirs: object, what_to_do: str = START_ALIKE, text: str = "") -> None:
        super().__init__(text or f"{field} differs: here {ours!r}, at the peer {theirs!r}; {what_to_do}")
        self.what_to_do = what_to_do
        self.field = field
        self.ours = ours
        self.theirs = theirs


class HandshakeError(ConnectorError):
    """The side channel got an unreadable, oversized or refused message, or no answer."""

    cause = "refused"


class PeerDead(HandshakeError):
    """The peer's process ended, or closed its connection."""

    cause = "peer_dead"


class MalformedParams(HandshakeError):
    """`kv_transfer_params` name a hand-off, and not where it leads: a client or router changed them."""

    cause = "malformed_params"


class StaleGeneration(HandshakeError):
    """The peer's memory is not what it was when hands were shaken, or when it held the request."""

    cause = "stale_generation"


class TransferError(ConnectorError):
    """A transfer failed."""

    cause = "transfer_failed"


class TicketRefused(TransferError):
    """A ticket is missing or forged, or is of another hold, engine or place."""

    cause = "ticket_refused"


class TransferCancelled(TransferError):
    """The engine asked for the end of a pull, as when its request is aborted."""

    cause = "cancelled"


class TransferTimeout(TransferError, TimeoutError):
    """A transfer gave no answer before its deadline."""

    cause = "timeout"


class LeaseExpired(TransferTimeout):
    """The owner need not have kept the blocks any longer, so what was read may be something else."""

    cause = "lease_expired"


class EngineError(KVXError):
    """An engine process did not start, died, or is not a version that kvx knows."""


class ModelError(KVXError, ValueError):
    """A model's `config.json` (or checkpoint) with which nothing can be planned, or ranks that its heads do not fit."""


class DatasetError(KVXError, ValueError):
    """A question file is missing or malformed; `line` (from 1) says where, 0 for the whole file."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class VerificationError(KVXError):
    """Answers, digests or counters of a verified run do not agree, or digests of a pull."""

    cause = "digest_mismatch"
