"""Membership: files of the first node, invitations, and what is refused."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from pmdaemon.pki import contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.pki.errors import PkiError
from sla_server.cluster import membership
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import (
    BadInvitation,
    ClusterError,
    ClusterRefused,
    EssentialsDiffer,
    NotAMember,
)


def _config(node: str = "n1", peer: str = "n2", *, tls: bool = False, **changes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "node": node,
            "peers": [{"name": peer, "listen": "127.0.0.1:4223", "routes": "127.0.0.1:6223"}],
            "tls": {"enabled": tls},
            **changes,
        }
    )


def _invited(tmp_path: Path, *, tls: bool = False) -> Path:
    """A first node in ``one``, and the invitation of n2."""
    authority = Authority(tmp_path / "ca")
    if tls:
        authority.init()
    membership.init(_config(tls=tls), tmp_path / "one", authority)
    path = tmp_path / "n2.invitation"
    path.write_text(membership.invitation(_config(tls=tls), tmp_path / "one", authority, "n2"))
    return path


def test_a_node_that_was_invited_has_the_same_secrets(tmp_path: Path) -> None:
    path = _invited(tmp_path)
    config = _config("n2", "n1")
    membership.join(config, tmp_path / "two", path)
    first = membership.load(_config(), tmp_path / "one")
    assert membership.load(config, tmp_path / "two") == first
    membership.init(_config(), tmp_path / "other", Authority(tmp_path / "ca"))
    other = membership.load(_config(), tmp_path / "other").identity  # of a cluster of the same name
    assert len({first.identity, other}) == 2
    assert first.secrets.product not in first.identity
    assert len({first.secrets.system, first.secrets.product, first.secrets.route}) == 3
    for name in ("one", "two"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / name / membership.CREDENTIALS).stat().st_mode) == 0o600


def test_with_tls_an_invitation_has_a_certificate_of_the_authority(tmp_path: Path) -> None:
    path = _invited(tmp_path, tls=True)
    config = _config("n2", "n1", tls=True)
    membership.join(config, tmp_path / "two", path)
    files = membership.load(config, tmp_path / "two").tls
    assert files is not None
    contexts.node(files.authority, files.certificate)
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600


def test_the_node_that_has_the_authority_renews_its_own_certificate(tmp_path: Path) -> None:
    _invited(tmp_path, tls=True)
    config, directory = _config(tls=True), tmp_path / "one"
    former = membership.load(config, directory)
    assert former.tls is not None
    pem = former.tls.certificate.read_bytes()
    path = tmp_path / "n1.invitation"
    path.write_text(membership.invitation(config, directory, Authority(tmp_path / "ca"), "n1"))
    membership.join(config, directory, path, again=True)
    assert membership.load(config, directory) == former  # the same secrets, the same files
    assert former.tls.certificate.read_bytes() != pem
    contexts.node(former.tls.authority, former.tls.certificate)


def test_tls_without_an_authority_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PkiError):
        membership.init(_config(tls=True), tmp_path / "one", Authority(tmp_path / "ca"))
    with pytest.raises(NotAMember):
        membership.load(_config(tls=True), tmp_path / "one")


def test_tls_enabled_later_asks_for_a_certificate(tmp_path: Path) -> None:
    _invited(tmp_path)
    with pytest.raises(ClusterRefused, match="has no certificate"):
        membership.load(_config(tls=True), tmp_path / "one")


def test_a_member_is_made_once(tmp_path: Path) -> None:
    path = _invited(tmp_path)
    with pytest.raises(ClusterError, match="belongs to the cluster 'sla' already"):
        membership.init(_config(), tmp_path / "one", Authority(tmp_path / "ca"))
    config = _config("n2", "n1")
    membership.join(config, tmp_path / "two", path)
    with pytest.raises(ClusterError, match="already"):
        membership.join(config, tmp_path / "two", path)
    membership.join(config, tmp_path / "two", path, again=True)


def test_an_invitation_is_for_one_node_and_for_the_same_parameters(tmp_path: Path) -> None:
    path = _invited(tmp_path)
    with pytest.raises(BadInvitation, match="is for the node 'n2', and"):
        membership.join(_config("n3", "n1"), tmp_path / "three", path)
    with pytest.raises(EssentialsDiffer, match="replicas is 5 here and 3 there"):
        membership.join(_config("n2", "n1", replicas=5), tmp_path / "two", path)
    with pytest.raises(EssentialsDiffer, match="name is other here and sla there"):
        membership.join(_config("n2", "n1", name="other"), tmp_path / "two", path)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"kind": "sla-cluster-invitation"}', "x" * 70_000],
    ids=["empty", "nothing", "list", "half", "long"],
)
def test_another_file_is_no_invitation(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(BadInvitation, match="is no invitation"):
        membership.join(_config(), tmp_path / "one", path)


def test_an_invitation_writes_no_other_files(tmp_path: Path) -> None:
    path = _invited(tmp_path)
    document = json.loads(path.read_text())
    document["tls"] = {"../../outside": "x"}
    path.write_text(json.dumps(document))
    with pytest.raises(BadInvitation):
        membership.join(_config("n2", "n1"), tmp_path / "two", path)


def test_only_listed_nodes_are_invited(tmp_path: Path) -> None:
    _invited(tmp_path)
    with pytest.raises(ClusterRefused, match=r"n9 is not listed in \[\[cluster.peers\]\] \(listed: n2\)"):
        membership.invitation(_config(), tmp_path / "one", Authority(tmp_path / "ca"), "n9")


def test_credentials_of_another_cluster_or_damaged_are_refused(tmp_path: Path) -> None:
    _invited(tmp_path)
    with pytest.raises(
        ClusterRefused, match=r"belongs to the cluster 'sla', and \[cluster\] name is 'other'"
    ):
        membership.load(_config(name="other"), tmp_path / "one")
    (tmp_path / "one" / membership.CREDENTIALS).write_text("{")
    with pytest.raises(ClusterRefused, match="is damaged"):
        membership.load(_config(), tmp_path / "one")


def test_one_that_leaves_has_nothing_left(tmp_path: Path) -> None:
    _invited(tmp_path)
    (tmp_path / "one/jetstream/x").mkdir(parents=True)
    membership.leave(tmp_path / "one")
    membership.leave(tmp_path / "one")
    assert list((tmp_path / "one").iterdir()) == []
