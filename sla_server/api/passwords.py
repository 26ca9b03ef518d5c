"""Passwords: argon2id hashes, and how often somebody may try.

One hash takes ``HASH_KIB`` of memory and some 0.1 s of a processor; ``HASHES`` of them are made at a time,
and one more waits ``HASH_WAIT_S`` at most. A name without an account costs the same time as one with.

Tries are limited for each account and each address by a table of fixed size: a key's place in it depends on a
secret of the process, so nobody can choose another one's. Two keys at one place share their tries, rarely.
Threads: any, under the locks here.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import threading
from array import array
from typing import Final

import argon2

from pmdaemon.runtime.clock import Clock
from sla_server.api.errors import TooManyLogins, Unavailable

HASH_KIB: Final = 64 * 1024
HASHES: Final = 2
HASH_WAIT_S: Final = 10.0
PASSWORD_MIN: Final = 12
PASSWORD_MAX: Final = 1024
PAIR_TRIES: Final = (5, 30.0)
"""Burst, and seconds for one more; of an account from one address, so that strangers lock nobody out."""
ADDRESS_TRIES: Final = (20, 5.0)
"""The same of an address (IPv6: of a network of 64 bits)."""
ACCOUNT_TRIES: Final = (200, 2.0)
"""The same of an account from all addresses: 43,000 guesses a day of 12 characters and more."""
PLACES: Final = 65_536


class Passwords:
    """Makes and checks hashes."""

    def __init__(self, hasher: argon2.PasswordHasher | None = None) -> None:
        self._hasher = hasher or argon2.PasswordHasher(time_cost=3, memory_cost=HASH_KIB, parallelism=1)
        self._places = threading.BoundedSemaphore(HASHES)
        self._nobody = ""

    def hash(self, password: str) -> str:
        """The text to store."""
        with self._place():
            return self._hasher.hash(password)

    def verify(self, stored: str, password: str) -> bool:
        """Whether it is the password; ``stored`` may be empty, for no account or one without a password."""
        with self._place():
            if not self._nobody:
                self._nobody = self._hasher.hash(secrets.token_urlsafe(16))
            try:
                return self._hasher.verify(stored or self._nobody, password) and bool(stored)
            except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
                return False

    def _place(self) -> _Place:
        if not self._places.acquire(timeout=HASH_WAIT_S):
            raise Unavailable("too many people sign in at this moment", "Try again in some seconds")
        return _Place(self._places)


class _Place:
    def __init__(self, places: threading.BoundedSemaphore) -> None:
        self._places = places

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exc: object) -> None:
        self._places.release()


class _Tries:
    """So many at once, then one more every ``refill_s``; the caller has the lock."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._full_at_s = array("d", [0.0]) * PLACES  # when all tries are there again
        self._seed = secrets.token_bytes(16)

    def wait_s(self, key: str, now_s: float, *, takes: bool) -> float:
        """0 if there is a try, which is taken if ``takes``; else seconds until there is one."""
        digest = hashlib.blake2b(key.encode(errors="replace"), key=self._seed, digest_size=8).digest()
        place = int.from_bytes(digest) % PLACES
        full_at_s = max(self._full_at_s[place], now_s)
        wait_s = full_at_s - now_s - (self._burst - 1) * self._refill_s
        if wait_s > 0:
            return wait_s
        if takes:
            self._full_at_s[place] = full_at_s + self._refill_s
        return 0.0

    def give_back(self, key: str) -> None:
        digest = hashlib.blake2b(key.encode(errors="replace"), key=self._seed, digest_size=8).digest()
        self._full_at_s[int.from_bytes(digest) % PLACES] -= self._refill_s


class LoginLimits:
    """How often passwords may be tried. Thread: any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs, self._addresses, self._accounts = (
            _Tries(*tries) for tries in (PAIR_TRIES, ADDRESS_TRIES, ACCOUNT_TRIES)
        )

    def take(self, account: str, address: str) -> None:
        """Take one try.

        Raises:
            TooManyLogins: of the account, from the address, or of both together; none was taken.
        """
        now_s, limits = self._clock.monotonic_ns() / 1e9, self._limits_of(account, address)
        with self._lock:
            wait_s = max(tries.wait_s(key, now_s, takes=False) for tries, key in limits)
            if wait_s <= 0:
                for tries, key in limits:
                    tries.wait_s(key, now_s, takes=True)
        if wait_s > 0:
            raise TooManyLogins(wait_s)

    def succeeded(self, account: str, address: str) -> None:
        """It was the right password: the try does not count."""
        with self._lock:
            for tries, key in self._limits_of(account, address):
                tries.give_back(key)

    def _limits_of(self, account: str, address: str) -> tuple[tuple[_Tries, str], ...]:
        network = network_of(address)
        pair = f"{network} {account}"
        return (self._pairs, pair), (self._addresses, network), (self._accounts, account)


def network_of(address: str) -> str:
    """What counts as one place in the network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return "local"
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
