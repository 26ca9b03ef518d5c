"""What the server around a node says of itself to the other nodes: release, page, whether it takes over.

A node's engine carries it as tags, beside the essential parameters, so every node can be asked for it at any
time. Nothing depends on it but what people are shown: nodes of former releases say nothing, and are listed
without it. The engine writes its tags in small letters.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from pmdaemon.runtime.config import parse_address
from sla_server.cluster.config import page_address

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

PREFIX: Final = "server."


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """See the module.

    Attributes:
        release: of the product; "": not known.
        takes_over: whether its server is one of several; False also of a node without a server.
        page: where its page is; "": not known.
        links: where it takes agents that others forward; no tag, for it goes with the lease.
    """

    release: str = ""
    takes_over: bool = False
    page: str = ""
    links: str = ""

    def tags(self) -> list[str]:
        """What the engine of the node carries."""
        shown = {"release": self.release, "takes-over": "yes" if self.takes_over else "", "page": self.page}
        return [f"{PREFIX}{key}:{value}" for key, value in shown.items() if value]

    @classmethod
    def of_tags(cls, found: Iterable[str]) -> ServerFacts:
        """From the tags of an engine; other tags are passed over, and a page that is no address."""
        pairs = (tag.removeprefix(PREFIX).partition(":") for tag in found if tag.startswith(PREFIX))
        shown = {key: value for key, _, value in pairs}
        takes_over = shown.get("takes-over") == "yes"
        return cls(shown.get("release", ""), takes_over, page_address(shown.get("page", "")))

    @classmethod
    def of(cls, config: ResolvedConfig, *, is_alone: bool) -> ServerFacts:
        """Of the server of this configuration; ``is_alone``: the node has none around it."""
        release = version("storage-sla-server")
        if is_alone or config.cluster is None or not config.cluster.takeover.enabled:
            return cls(release)
        return cls(release, takes_over=True, page=page_of(config), links=config.pmdaemon.forwarded)


NOTHING_SAID: Final = ServerFacts()
"""As of a node of a former release."""


def page_of(config: ResolvedConfig) -> str:
    """Where the page of this server is for people elsewhere; "": its file does not say."""
    api = config.api
    if config.cluster is not None and config.cluster.takeover.page:
        return config.cluster.takeover.page
    if api.external_url:
        return page_address(api.external_url)
    scheme = "https" if api.tls.certificate else "http"
    return page_address(f"{scheme}://{api.listen}") if _is_there_elsewhere(config) else ""


def _is_there_elsewhere(config: ResolvedConfig) -> bool:
    """Whether `listen` is an address that people at another server can use.

    A loopback one leads them to their own machine; it is right only where all nodes are on one.
    """
    host = ipaddress.ip_address(parse_address(config.api.listen)[0])
    if not host.is_loopback:
        return not host.is_unspecified
    return (
        config.cluster is not None
        and ipaddress.ip_address(parse_address(config.cluster.routes)[0]).is_loopback
    )
