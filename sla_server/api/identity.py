"""Who a provider of OpenID Connect says somebody is, and what that is here: name, role and labels. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pmdaemon.runtime.excerpt import printable
from sla_server.api.config import OidcConfig
from sla_server.api.errors import LoginRefused
from sla_server.requests import ACCOUNT_NAME, NOT_ACCOUNTS

BEGIN_AGAIN: Final = "Begin again, or sign in with name and password"
ASK: Final = (
    "Ask the administrator of this server: [[api.oidc.map]] in its configuration says who may come in"
)
IDENTITY_MAX: Final = 512
EMAIL: Final = "email"


@dataclass(frozen=True, slots=True)
class ProviderIdentity:
    """Somebody whom the provider vouches for."""

    subject: str
    """Issuer and the provider's own, lasting name; it decides whose account it is."""
    name: str
    """Of the account."""
    role: str
    """Empty: the configuration lets them not in."""
    labels: str


def identity_of(config: OidcConfig, claims: Mapping[str, Any]) -> ProviderIdentity:
    """What the claims of an ID token mean here; the first row of the configuration that fits decides.

    Raises:
        LoginRefused: no claim has a name that an account can have.
    """
    name = value_of(claims, config.name_claim)
    is_text = isinstance(name, str) and name.strip().lower() not in NOT_ACCOUNTS
    if not is_text or not re.fullmatch(ACCOUNT_NAME, name.strip().lower()):
        shown = "does not say" if name is None else f"says {printable(str(name), 80)!r} as"
        problem = f"the provider {shown} a name for the account (claim {config.name_claim})"
        raise LoginRefused(
            problem, "An administrator sets name_claim in [api.oidc] to a claim with a usable name"
        )
    if _proven(claims, config.name_claim) is None:
        problem = "the provider has not verified that address of mail, or does not say so (email_verified)"
        raise LoginRefused(problem, "Verify it with the provider")
    subject = f"{config.issuer} {claims['sub']}"
    if len(subject) > IDENTITY_MAX or not subject.isprintable():
        raise LoginRefused("the provider's name for you (claim sub) cannot be stored", BEGIN_AGAIN)
    row = next((row for row in config.map if row.value in _texts(_proven(claims, row.claim))), None)
    return ProviderIdentity(subject, name.strip().lower(), row.role if row else "", row.labels if row else "")


def is_complete(config: OidcConfig, claims: Mapping[str, Any]) -> bool:
    """Whether the claims decide: nothing that is missing could change what they mean."""
    if _is_open(claims, config.name_claim):
        return False
    for row in config.map:
        if _is_open(claims, row.claim):
            return False
        if row.value in _texts(_proven(claims, row.claim)):
            return True
    return True


def _is_open(claims: Mapping[str, Any], name: str) -> bool:
    needed = (name, "email_verified") if name == EMAIL else (name,)
    return any(value_of(claims, each) is None for each in needed)


def _proven(claims: Mapping[str, Any], name: str) -> Any:
    """A claim; an address of mail only if the provider has verified it: who may write any has that of all."""
    if name == EMAIL and value_of(claims, "email_verified") not in (True, "true"):  # a text at some
        return None
    return value_of(claims, name)


def value_of(claims: Mapping[str, Any], name: str) -> Any:
    """A claim of that name, or within others: ``realm_access.roles``."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]
