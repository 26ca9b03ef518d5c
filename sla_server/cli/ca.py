"""``sla ca``: the certificate authority for gateways. Works on the server's own files, as the server's user.

The running server notices by itself what these commands change, within about a second.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from pmdaemon.pki import certificates
from pmdaemon.pki.authority import CA_DAYS, DAY_S, Authority, IssuedCertificate
from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import sync_directory
from pmdaemon.wire.names import is_name
from sla_server import config as configuration
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, CliError
from sla_server.cli.formatting import OUTPUT, Column, FiniteRange, build, console, duration_s, print_json
from sla_server.ownership import MOST_PATTERNS, PATTERN_RE

TOKEN_LIMIT_S: Final = 30 * DAY_S
COLUMNS: Final = (
    Column("NAME", lambda row, _now_us: str(row["name"])),
    Column("STATE", lambda row, _now_us: str(row["state"])),
    Column("UNTIL", lambda row, _now_us: _day(row["not_after_us"])),
    Column("BY", lambda row, _now_us: str(row["by"])),
    Column("SERIAL", lambda row, _now_us: str(row["serial"]), number=True),  # in one piece, to be copied
)

VOLUMES: Final = click.option(
    "--volumes",
    multiple=True,
    metavar="[BACKEND/]VOLUME",
    help="Only these it may show by itself ('vol-1*'); others need approval. May be repeated.",
)


@click.group(cls=Commands)
def ca() -> None:
    """Certificates for gateways: make the authority, enrol, revoke, list."""


def _record(action: str, subject: str, **after: str) -> None:
    """Have the running server note it in its audit log, with the user's name."""
    client: Client = click.get_current_context().find_root().obj
    try:
        client.change("POST", "/audit/notes", json={"action": action, "subject": subject, "after": after})
    except CliError as exc:
        reason = str(exc).partition("\n")[0]
        click.echo(f"note: this is not in the audit log, as the server did not take it: {reason}", err=True)


def _config() -> configuration.ResolvedConfig:
    path: Path | None = click.get_current_context().find_root().params.get("config")
    return configuration.load(path)


def authority_of(config: configuration.ResolvedConfig) -> Authority:
    """The server's own."""
    return Authority(config.ca_dir, config.pmdaemon.tls.lifetime_s)


@ca.command()
@click.option("--days", type=FiniteRange(1, 36500), default=CA_DAYS, help="Life of the authority.")
def init(days: float) -> None:
    """Make the authority: once a server, before TLS is enabled."""
    config = _config()
    fingerprint = authority_of(config).init(days * DAY_S)
    _record("ca-init", "authority", fingerprint=fingerprint)
    click.echo(f"certificate authority made in {config.ca_dir}\nfingerprint {fingerprint}")
    if not config.pmdaemon.tls.enabled:
        click.echo("Now, in the server's file: [pmdaemon.tls] enabled = true; then restart the server")


@ca.command()
@click.argument("name")
@click.option("--for", "lifetime", default="24h", show_default=True, help="How long the token is good.")
@click.option("--address", metavar="HOST:PORT", help="Where this gateway reaches the server.")
@VOLUMES
@click.option("-q", "--quiet", is_flag=True, help="Print the token alone.")
def token(name: str, lifetime: str, address: str | None, volumes: tuple[str, ...], quiet: bool) -> None:
    """Make a one-time token for the gateway NAME; prints what to run on its host."""
    _check_name(name)
    _check_volumes(volumes)
    lifetime_s = duration_s(lifetime, "--for")
    if lifetime_s > TOKEN_LIMIT_S:
        raise BadUsage(
            f"--for {lifetime}: a token is good for 30 days at most; another can be made at any time"
        )
    if address is not None and not re.fullmatch(r"\S+:\d+", address):
        raise BadUsage(
            f"--address {address}: give HOST:PORT, the server's pmdaemon.listen as the host sees it"
        )
    config = _config()
    authority = authority_of(config)
    made, expires_us = authority.token(name, lifetime_s, volumes)
    _record("ca-token", name, until=formatting.when(expires_us), volumes=", ".join(volumes))
    if quiet:
        click.echo(made)
        return
    where = address or _own_address(config)
    click.echo(
        f"token for {name}, good once until {formatting.when(expires_us)}. "
        "On the gateway's host, as its user:\n"
    )
    click.echo(
        f"  read -rs SLA_ENROL_TOKEN && export SLA_ENROL_TOKEN    # then paste: {made}\n"
        f"  gateway-agent enrol --config agent.toml --server {shlex.quote(where)} \\\n"
        f"    --fingerprint {authority.fingerprint()}"
    )


def _own_address(config: configuration.ResolvedConfig) -> str:
    host, port = parse_address(config.pmdaemon.listen)
    return f"{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104 - compared only


def _check_volumes(volumes: tuple[str, ...]) -> None:
    if len(volumes) > MOST_PATTERNS:
        raise BadUsage(f"--volumes is given {len(volumes)} times; {MOST_PATTERNS} is the most: use patterns")
    for pattern in volumes:
        if not PATTERN_RE.fullmatch(pattern):
            raise BadUsage(
                f"--volumes {pattern}: give a volume or BACKEND/VOLUME: letters, digits, . _ : @ - and * ?"
            )


def _check_name(name: str) -> None:
    if not is_name(name):
        raise BadUsage(
            f"{name!r} is no name: 1-128 of letters, digits and . _ : @ -, first a letter or digit"
        )


@ca.command()
@click.argument("name")
@click.option("--gateway-id", type=click.UUID, required=True, help="The agent's state_dir/gateway_id.")
@click.option(
    "--csr", type=click.Path(path_type=Path), help="Its signing request; without, a key is made here."
)
@VOLUMES
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="Where to write the PEM.")
def issue(name: str, gateway_id: uuid.UUID, csr: Path | None, volumes: tuple[str, ...], output: Path) -> None:
    """Issue a certificate by hand, for a host that cannot enrol over the network."""
    _check_name(name)
    _check_volumes(volumes)
    config = _config()
    key = None
    try:
        if csr is not None:
            request = csr.read_bytes()
        else:
            key = certificates.make_key()
            request = certificates.make_request(key, name)
        with _new_file(output) as stream:  # first: a certificate that nobody receives should not be recorded
            made = authority_of(config).issue(request, str(gateway_id), name, volumes)
            key_text = certificates.key_pem(key) if key is not None else b""
            stream.write(key_text + certificates.pem_of_der(made))
    except OSError as exc:
        raise BadUsage(
            f"{exc.filename or output}: {exc.strerror}; name an existing --csr and a new file for -o"
        ) from exc
    ca_file = config.ca_dir / "ca.crt"
    _record("ca-issue", name, gateway_id=str(gateway_id))
    click.echo(
        f"written to {output}. On the gateway: as state_dir/tls/gateway.pem, beside it {ca_file} as ca.crt"
    )


@ca.command()
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="For a gateway's listeners: a name or address that its clients connect to. May be repeated.",
)
@click.option("--days", type=FiniteRange(1, 3650), default=90.0, show_default=True, help="Its life.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="A new directory.")
def nbd(name: str, hosts: tuple[str, ...], days: float, output: Path) -> None:
    """Make a certificate for NBD over TLS: for the client NAME, or with --host for a gateway.

    Files are named as libnbd, QEMU and nbdkit want them. It cannot be revoked: take its name out of the
    exports' allow_names.
    """
    _check_name(name)
    for host in hosts:
        if not _is_host(host):
            raise BadUsage(f"--host {host}: give a host name or an IP address, without a port")
    config = _config()
    authority = authority_of(config)
    key, certificate = authority.nbd_credential(name, hosts, days * DAY_S)
    kind = "server" if hosts else "client"
    ca_pem = (config.ca_dir / "ca.crt").read_bytes()
    _write_files(output, {f"{kind}-key.pem": key, f"{kind}-cert.pem": certificate, "ca-cert.pem": ca_pem})
    _record("ca-nbd", name, hosts=", ".join(hosts), days=f"{days:.0f}")
    click.echo(f"written to {output}, good for {days:.0f} days\n{_NBD_USE[kind]}")


@ca.command()
@click.option(
    "--host",
    "hosts",
    multiple=True,
    required=True,
    metavar="HOST",
    help="A name or address that browsers use.",
)
@click.option("--days", type=FiniteRange(1, 397), default=90.0, show_default=True, help="Its life.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="A new directory.")
def page(hosts: tuple[str, ...], days: float, output: Path) -> None:
    """Make the certificate of page and API, for browsers that trust this authority.

    Make another before it ends, and put its files in the place of the former: the server reads them again by
    itself. It cannot be revoked.
    """
    for host in hosts:
        if not _is_host(host):
            raise BadUsage(f"--host {host}: give a host name or an IP address, without a port")
    config = _config()
    key, certificate = authority_of(config).nbd_credential("storage-sla page", hosts, days * DAY_S)
    authority = config.ca_dir / "ca.crt"
    made = {"page-key.pem": key, "page-cert.pem": certificate, "ca.crt": authority.read_bytes()}
    _write_files(output, made)
    _record("ca-page", ", ".join(hosts)[:200], days=f"{days:.0f}")
    folder, allowed = output.absolute(), ", ".join(f'"{host}"' for host in hosts)
    click.echo(
        f"written to {output}, good for {days:.0f} days. In the server's file, then restart it:\n"
        f'  [api]\n  reading = "login"\n  allowed_hosts = [{allowed}]\n'
        f'  [api.tls]\n  certificate = "{folder}/page-cert.pem"\n  key = "{folder}/page-key.pem"\n'
        f"Browsers and the command line elsewhere must trust {authority} (sla --ca-file)"
    )


def _write_files(output: Path, contents: dict[str, bytes]) -> None:
    """Files in a new directory: on disk before the audit log has them, or gone with it."""
    try:
        output.mkdir(mode=0o700)
        try:
            for file, content in contents.items():
                with _new_file(output / file) as stream:
                    stream.write(content)
            sync_directory(output.absolute().parent)
        except BaseException:
            shutil.rmtree(output, ignore_errors=True)
            raise
    except OSError as exc:
        raise BadUsage(f"-o {output}: {exc.strerror}; name a directory that does not exist yet") from exc


@ca.command("pair")
@click.argument("name")
@click.option("--days", type=FiniteRange(1, 3650), default=365.0, show_default=True, help="Its life.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="A new directory.")
def pair_(name: str, days: float, output: Path) -> None:
    """Make the certificate of NAME, one of two servers that keep each other's events.

    Both servers need one from the same authority. It cannot be revoked: give the server another name.
    """
    _check_name(name)
    config = _config()
    made = authority_of(config).partner_credential(name, days * DAY_S)
    _write_files(output, {"pair.pem": made, "ca.crt": (config.ca_dir / "ca.crt").read_bytes()})
    _record("ca-pair", name, days=f"{days:.0f}")
    click.echo(
        f"written to {output}, good for {days:.0f} days. Move it to server {name} as DATA_DIR/pair; "
        f'there: [events.pair] name = "{name}"'
    )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.-]{0,252}", text) is not None
    return True


_NBD_USE: Final = {
    "client": "Move it to the client's host; then, for example:\n"
    "  nbdinfo 'nbds://GATEWAY/VOLUME?tls-certificates=DIRECTORY'",
    "server": "Move it to the gateway; in its [[plane]]:\n"
    '  tls = "require"\n'
    '  tls_certificate = "DIRECTORY/server-cert.pem"\n'
    '  tls_key = "DIRECTORY/server-key.pem"\n'
    '  client_ca = "DIRECTORY/ca-cert.pem"',
}


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that did not exist (mode 0600): on disk after the block, gone again if that fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(fd)
        sync_directory(path.absolute().parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@ca.command()
@click.argument("who", metavar="NAME|GATEWAY_ID|SERIAL")
@click.option("--reason", default="", help="Kept with the revocation.")
def revoke(who: str, reason: str) -> None:
    """End a gateway's certificates and withdraw its tokens; a live session ends within about a second."""
    revoked, withdrawn = authority_of(_config()).revoke(who, reason)
    serials = ", ".join(entry.serial for entry in revoked)
    _record("ca-revoke", who[:200], reason=reason[:200], serials=serials[:1000])
    for entry in revoked:
        click.echo(f"revoked {entry.serial} of {entry.name} ({entry.gateway_id})")
    for token in withdrawn:
        click.echo(f"withdrawn the token that waited for {token.name}")


@ca.command("list")
@OUTPUT
def list_(output: str) -> None:
    """List the gateways' certificates and the tokens that wait."""
    authority, now_us = authority_of(_config()), time.time_ns() // 1000
    entries = authority.entries()
    waiting = authority.waiting_tokens()
    if output == "json":
        print_json(
            {
                "fingerprint": authority.fingerprint(),
                "certificates": [_json(entry, now_us) for entry in entries],
                "tokens": [
                    {"name": item.name, "expires_us": item.expires_us, "volumes": item.volumes}
                    for item in waiting
                ],
            }
        )
        return
    click.echo(f"authority {authority.fingerprint()}")
    for item in waiting:
        click.echo(f"token for {item.name}, good until {formatting.when(item.expires_us)}")
    if not entries:
        click.echo("No gateway is enrolled. Begin with: sla ca token NAME")
        return
    console().print(build(COLUMNS, [_json(entry, now_us) for entry in entries], now_us))


def _day(at_us: int) -> str:
    """A date in this machine's zone, with its year."""
    return time.strftime("%Y-%m-%d", time.localtime(at_us / 1e6))


def _json(entry: IssuedCertificate, now_us: int) -> dict[str, Any]:
    return {
        "name": entry.name,
        "gateway_id": entry.gateway_id,
        "serial": entry.serial,
        "state": entry.state(now_us),
        "issued_us": entry.issued_us,
        "not_after_us": entry.not_after_us,
        "by": entry.how,
        "volumes": entry.volumes,
        "revoked_us": entry.revoked_us,
        "reason": entry.reason,
    }
