"""In which order the host pool gives its blocks to other hashes: pure lists of hashes, no blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

IsFree = Callable[[Hashable], bool]


class Order(ABC):
    """Which hash goes first."""

    @abstractmethod
    def keys(self) -> Iterable[Hashable]:
        """All hashes in host memory."""

    @abstractmethod
    def insert(self, key: Hashable) -> None:
        """A new hash."""

    @abstractmethod
    def hit(self, key: Hashable) -> None:
        """A hash is loaded."""

    @abstractmethod
    def renew(self, key: Hashable) -> None:
        """Somebody has its block without having loaded it."""

    @abstractmethod
    def remove(self, key: Hashable) -> None:
        """A hash is gone, by other ways than an eviction."""

    @abstractmethod
    def evict(self, is_free: IsFree) -> Hashable | None:
        """Take out the first hash that is free to go."""

    def expect(self, key: Hashable) -> None:
        """Before the eviction that makes room for `key`."""
        del key

    def resize(self, num_blocks: int) -> None:
        """So many host blocks there are from now on."""
        del num_blocks


class LeastRecentlyUsed(Order):
    def __init__(self) -> None:
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def keys(self) -> Iterable[Hashable]:
        return self._keys

    def insert(self, key: Hashable) -> None:
        self._keys[key] = None

    def hit(self, key: Hashable) -> None:
        self._keys.move_to_end(key)

    renew = hit

    def remove(self, key: Hashable) -> None:
        del self._keys[key]

    def evict(self, is_free: IsFree) -> Hashable | None:
        return _take_first(self._keys, is_free)


class AdaptiveReplacement(Order):
    """ARC (Megiddo and Modha, FAST 2003): hashes seen once and hashes loaded again, in two lists.

    Each list remembers what was evicted from it. A hash that returns and is remembered shows which list was too short;
    `_once_share` is how many blocks the first list may have before it gives some.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._again: OrderedDict[Hashable, None] = OrderedDict()
        self._gone_once: OrderedDict[Hashable, None] = OrderedDict()
        self._gone_again: OrderedDict[Hashable, None] = OrderedDict()
        self._once_share = 0.0
        self._num_blocks = 0

    def keys(self) -> Iterable[Hashable]:
        return [*self._once, *self._again]

    def resize(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._once_share = min(self._once_share, num_blocks)
        self._forget()

    def expect(self, key: Hashable) -> None:
        if key in self._gone_once:
            step = max(1.0, len(self._gone_again) / len(self._gone_once))
            self._once_share = min(float(self._num_blocks), self._once_share + step)
        elif key in self._gone_again:
            step = max(1.0, len(self._gone_once) / len(self._gone_again))
            self._once_share = max(0.0, self._once_share - step)

    def insert(self, key: Hashable) -> None:
        is_remembered = key in self._gone_once or key in self._gone_again
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)
        (self._again if is_remembered else self._once)[key] = None
        self._forget()

    def hit(self, key: Hashable) -> None:
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def renew(self, key: Hashable) -> None:
        (self._once if key in self._once else self._again).move_to_end(key)

    def remove(self, key: Hashable) -> None:
        del (self._once if key in self._once else self._again)[key]

    def evict(self, is_free: IsFree) -> Hashable | None:
        lists = [(self._once, self._gone_once), (self._again, self._gone_again)]
        if len(self._once) <= self._once_share:
            lists.reverse()
        for present, gone in lists:
            key = _take_first(present, is_free)
            if key is not None:
                gone[key] = None
                self._forget()
                return key
        return None

    def _forget(self) -> None:
        """What is remembered is as long as the pool: first what was seen once, then all."""
        while self._gone_once and len(self._once) + len(self._gone_once) > self._num_blocks:
            self._gone_once.popitem(last=False)
        total = len(self._once) + len(self._again)
        while self._gone_again and total + len(self._gone_once) + len(self._gone_again) > 2 * self._num_blocks:
            self._gone_again.popitem(last=False)


ORDERS: dict[str, type[Order]] = {"lru": LeastRecentlyUsed, "arc": AdaptiveReplacement}


def _take_first(keys: OrderedDict[Hashable, None], is_free: IsFree) -> Hashable | None:
    found = next((key for key in keys if is_free(key)), None)
    if found is not None:
        del keys[found]
    return found
