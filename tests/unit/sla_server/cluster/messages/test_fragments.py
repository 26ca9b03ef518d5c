"""Fragments: what comes out is what went in, or an error."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages.consumer import Received
from sla_server.cluster.messages.errors import FragmentsDamaged
from sla_server.cluster.messages.fragments import Assembly, Manifest, fragment_subject, fragments_identity


def _manifest(pieces: list[bytes]) -> Manifest:
    whole = b"".join(pieces)
    return Manifest(len(pieces), len(whole), hashlib.sha256(whole).hexdigest())


@given(st.lists(st.binary(max_size=5), max_size=6), st.lists(st.binary(max_size=5), max_size=6))
def test_only_what_was_sent_passes(sent: list[bytes], came: list[bytes]) -> None:
    manifest = Manifest.parse("x", _manifest(sent).encode())
    assert manifest == _manifest(sent)
    assembly, is_whole = Assembly("x", manifest), True
    try:
        for piece in came:
            assembly.add(piece)
        assembly.finish()
    except FragmentsDamaged:
        is_whole = False
    assert is_whole == (b"".join(came) == b"".join(sent))


def test_words() -> None:
    assembly = Assembly("abc", _manifest([b"12", b"3"]))
    assembly.add(b"12")
    with pytest.raises(FragmentsDamaged, match="message abc: 2 of 3 bytes came"):
        assembly.finish()
    assembly.add(b"4")
    with pytest.raises(FragmentsDamaged, match="digest differs"):
        assembly.finish()
    for bad in ("", "1 2", "1 x y", "-1 2 y"):
        with pytest.raises(FragmentsDamaged, match="manifest"):
            Manifest.parse("abc", bad)
    assert fragment_subject("abc", 3) == "sla.f.abc.3"


def test_a_dead_message_has_the_fragments_of_the_first() -> None:
    alive = SimpleNamespace(identity="abc", headers={})
    dead = SimpleNamespace(identity="dead:films:abc", headers={"Sla-Identity": "abc"})
    assert fragments_identity(cast(Received, alive)) == fragments_identity(cast(Received, dead)) == "abc"
