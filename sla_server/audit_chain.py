"""The audit log as a chain: each row's digest is of the digest before it and of the row. Pure.

Whoever changes, removes or puts in a row later must make all digests behind it again, and whoever keeps one
of them elsewhere (``sla audit verify --head``) notices. Rows leave by age only: a row ``audit-pruned`` says
up to which number, with the digest of the last one, and which rows before it stay all the same, so what is
left can still be checked. The first row has number 1, and no digest before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

COLUMNS: Final = ("seq", "audit_id", "at_us", "who", "action", "subject", "before", "after")
PRUNED: Final = "audit-pruned"
KEEPER: Final = "server"
"""Who writes these rows: the database manager, for no person's request."""
MOST_PROBLEMS: Final = 20


def digest_of(previous: str, row: Mapping[str, Any]) -> str:
    """Digest of a row behind that one; JSON columns as the text that is stored."""
    text = json.dumps([row[name] for name in COLUMNS], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(f"{previous}\n{text}".encode(errors="surrogatepass")).hexdigest()


class ChainCheck:
    """Checks rows in the order of their numbers.

    Attributes:
        rows: how many it was given.
        seq, digest: of the last one: the head of the chain.
        problems: what is wrong, in words.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.seq = 0
        self.digest = ""
        self.problems: list[str] = []
        self._after_gaps: list[Mapping[str, Any]] = []
        self._pruned: dict[str, Any] | None = None
        self.digests: dict[int, str] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """The next row."""
        seq = row["seq"]
        if seq <= self.seq:
            self._problem(f"row {seq} comes after row {self.seq}: the numbers do not rise")
        elif seq == self.seq + 1:
            if digest_of(self.digest, row) != row["digest"]:
                self._problem(f"row {seq} ({row['action']}, by {row['who']}) is not what was recorded")
        else:
            self._after_gaps.append(dict(row))
        if row["action"] == PRUNED:
            self._read_pruned(row)
        self.rows += 1
        self.seq, self.digest = seq, row["digest"]

    def _read_pruned(self, row: Mapping[str, Any]) -> None:
        if row["who"] != KEEPER:
            self._problem(f"row {row['seq']} says that rows have left, and is by {row['who']}")
            return
        try:
            said = json.loads(row["after"])
            kept = {int(seq): (str(pair[0]), str(pair[1])) for seq, pair in said["kept"].items()}
            self._pruned = {"through": int(said["through"]), "digest": str(said["digest"]), "kept": kept}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            self._problem(f"row {row['seq']} says that rows have left, but not which")

    def end(self, head: tuple[int, str] | None = None, *, head_found: str | None = None) -> list[str]:
        """What is wrong, with what can be said at the end only.

        Args:
            head: number and digest that were noted elsewhere.
            head_found: digest of the row of that number, if there is one.
        """
        pruned = self._pruned or {"through": 0, "digest": "", "kept": {}}
        for row in self._after_gaps:
            seq = row["seq"]
            if seq == pruned["through"] + 1:
                previous, expected = pruned["digest"], row["digest"]
            elif seq in pruned["kept"]:
                previous, expected = pruned["kept"][seq]
            else:
                self._problem(f"the rows before row {seq} are missing, and no row says that they left by age")
                continue
            if expected != row["digest"] or digest_of(previous, row) != expected:
                self._problem(f"row {seq} ({row['action']}, by {row['who']}) is not what was recorded")
        if head is not None:
            if head[0] > self.seq:
                self._problem(
                    f"the log ends at row {self.seq}; row {head[0]} was noted before, so rows are missing"
                )
            else:
                self._check_head(head, head_found, pruned)
        return self.problems

    def _check_head(self, head: tuple[int, str], found: str | None, pruned: Mapping[str, Any]) -> None:
        """One that is not the end; if it has left by age, ``audit-pruned`` may still have its digest."""
        if found is None and head[0] == pruned["through"]:
            found = pruned["digest"]
        if found is None:
            self._problem(
                f"row {head[0]}, which was noted, is not there any more, so nothing shows that the rows "
                "behind it are those of then; note the head again before its row leaves by age"
            )
        elif found != head[1]:
            self._problem(f"row {head[0]} has another digest than the one that was noted")

    def _problem(self, text: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)
