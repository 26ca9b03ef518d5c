"""Sign-in through a provider of OpenID Connect: the code flow with PKCE, by authlib.

``begin`` gives the address of the provider and the text of a cookie; ``finish`` takes both back and says who
it is. What must be the same at the end as at the beginning (state, nonce, code verifier) is in that cookie,
signed and valid for ``PENDING_S``, so this process keeps nothing of a sign-in that was begun: strangers who
begin many cost no memory, and a restart disturbs nobody. The provider takes a code once.

The provider is asked when somebody signs in, at no other time: what it says of itself and its keys are kept
for ``FRESH_S``, keys are read again when a token names another one. ``ASKING_MAX`` requests wait for it at
once, ``ANSWER_S`` at most each, whatever the provider is asked in it and however slowly it answers; others
are refused, so a provider that hangs takes no more threads from the page. Lock ``_lock`` guards ``_known``.
Thread: any.
"""

from __future__ import annotations

from sla_server import lean_httpx  # noqa: F401 - before httpx: see there

# isort: split
import hmac
import secrets
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore
import httpx
from authlib.oauth2 import ClientAuth, OAuth2Client, OAuth2Error
from authlib.oidc.core import CodeIDToken
from itsdangerous import BadData, URLSafeSerializer
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.excerpt import printable
from sla_server.api.config import OidcConfig
from sla_server.api.errors import LoginRefused, NothingGuessed, Unavailable
from sla_server.api.identity import BEGIN_AGAIN, ProviderIdentity, identity_of, is_complete
from sla_server.events.recipients.network import BoundedBackend, Resolver
from sla_server.events.recipients.secret_files import SecretUnusable, read_secret

PENDING_S: Final = 600.0
FRESH_S: Final = 3600.0
ANSWER_S: Final = 10.0
ASKING_MAX: Final = 4
LEEWAY_S: Final = 120
"""How far the clocks of provider and server may be apart."""
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that the provider alone can make; never "none", never one with a key that we have, too."""
ENDPOINTS: Final = ("authorization_endpoint", "token_endpoint", "jwks_uri")
USERINFO: Final = "userinfo_endpoint"
"""Not every provider has one."""
LOCAL_WORKS: Final = "Try again later, or sign in with name and password, which needs no provider"


class ProviderClient(OAuth2Client):  # type: ignore[misc]  # authlib has no types
    """One conversation with the provider. What is said is authlib's; ``httpx`` carries it."""

    session: httpx.Client
    """Of one that only makes addresses None."""

    def _fetch_token(
        self, url: str, *, body: str, headers: dict[str, str], auth: ClientAuth, **_how: Any
    ) -> Any:
        url, headers, body = auth.prepare("POST", url, dict(headers), body)
        return self.parse_response_token(self.session.post(url, content=body, headers=headers))

    def ask(self, address: str, *, as_user: bool = False) -> dict[str, Any]:
        """A JSON object of the provider; ``as_user`` with the access token."""
        headers: dict[str, str] = {}
        if as_user:
            address, headers, _body = self.token_auth.prepare(address, headers, "")
        answer = self.session.get(address, headers=headers)
        answer.raise_for_status()
        found = answer.json()
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found


class BoundedTransport(httpx.HTTPTransport):
    """Connections of which every step ends at one deadline: a time-out of httpx is one of each read."""

    def __init__(self, trust: ssl.SSLContext, backend: BoundedBackend) -> None:
        super().__init__(verify=trust)
        # httpx makes its pool itself; only httpcore takes connections that are not its own.
        self._pool.close()
        self._pool = httpcore.ConnectionPool(ssl_context=trust, network_backend=backend)


class OidcProvider:
    """See the module.

    Args:
        redirect_url: where the provider sends browsers back; registered there.
        key: signs the cookie.
    """

    def __init__(self, config: OidcConfig, redirect_url: str, key: bytes, clock: Clock) -> None:
        self.config = config
        self._redirect_url = redirect_url
        self._signer = URLSafeSerializer(key, salt="oidc-sign-in")
        self._clock = clock
        self._resolver = Resolver()
        self._places = threading.BoundedSemaphore(ASKING_MAX)
        self._lock = threading.Lock()
        self._known: tuple[int, dict[str, Any], dict[str, Any]] | None = None  # since, metadata, keys

    def begin(self) -> tuple[str, str]:
        """Address to send the browser to, and the text of its cookie.

        Raises:
            Unavailable: the provider does not answer as it should, or its secret cannot be read.
        """
        known = self._remembered()
        if known is None:
            with self._asking() as client:
                known = self._provider(client)
        with self._explained():
            # Without a connection: to make ready for TLS takes 35 ms of a processor, and anybody may begin.
            client = self._client(None)
            pending = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
            address, _state = client.create_authorization_url(
                known[0]["authorization_endpoint"],
                state=pending["state"],
                nonce=pending["nonce"],
                code_verifier=pending["verifier"],
            )
        return address, self._signer.dumps({**pending, "at_us": self._clock.unix_us()})

    def finish(self, cookie: str, answer: Mapping[str, str]) -> ProviderIdentity:
        """Who it is, by what the provider has sent back with the browser.

        Raises:
            NothingGuessed: another browser began it, it is too old, or the provider says no by itself.
            LoginRefused: what the provider answers, or the mapping, refuse it.
            Unavailable: as ``begin``.
        """
        pending = self._pending(cookie)
        if not hmac.compare_digest(
            pending["state"].encode(), answer.get("state", "").encode(errors="replace")
        ):
            raise NothingGuessed(
                "this sign-in was not begun in this browser, or another one was since", BEGIN_AGAIN
            )
        if answer.get("iss", self.config.issuer) != self.config.issuer:
            raise NothingGuessed("the answer is that of another provider", BEGIN_AGAIN)
        if "code" not in answer:
            said = printable(answer.get("error_description") or answer.get("error") or "nothing", 200)
            raise NothingGuessed(f"the provider did not let you in: {said}", BEGIN_AGAIN)
        with self._asking() as client:
            return identity_of(self.config, self._claims(client, answer["code"], pending))

    def _pending(self, cookie: str) -> dict[str, str]:
        try:
            pending: dict[str, Any] = self._signer.loads(cookie)
        except BadData as exc:
            problem = "this browser has not begun to sign in, or does not take cookies"
            raise NothingGuessed(problem, BEGIN_AGAIN) from exc
        if not 0 <= self._clock.unix_us() - pending["at_us"] <= PENDING_S * 1e6:
            raise NothingGuessed(f"it took longer than {PENDING_S / 60:.0f} minutes", BEGIN_AGAIN)
        return pending

    @contextmanager
    def _asking(self) -> Iterator[ProviderClient]:
        """A client of the provider, in one of the places."""
        if not self._places.acquire(blocking=False):
            raise Unavailable("too many people sign in at this moment", "Try again in some seconds")
        try:
            with self._explained():
                trust = ssl.create_default_context(cafile=self.config.ca_file)
                backend = BoundedBackend(self._resolver)
                backend.deadline = Deadline(ANSWER_S, self._clock)
                transport = BoundedTransport(trust, backend)
                # Without the proxies of the environment: they would bring connections of their own.
                with httpx.Client(transport=transport, trust_env=False, follow_redirects=False) as http:
                    yield self._client(http)
        finally:
            self._places.release()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Every failure at the provider as one of ours."""
        issuer = self.config.issuer
        try:
            yield
        except (OAuth2Error, JoseError) as exc:
            problem = f"the provider's answer is not accepted: {printable(str(exc), 200)}"
            raise LoginRefused(problem, BEGIN_AGAIN) from exc
        except httpx.HTTPStatusError as exc:
            problem = f"the sign-in provider {issuer} answers with status {exc.response.status_code}"
            raise Unavailable(problem, LOCAL_WORKS) from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            problem = f"the sign-in provider {issuer} cannot be reached: {printable(str(exc), 200)}"
            raise Unavailable(problem, LOCAL_WORKS) from exc
        except SecretUnusable as exc:
            raise Unavailable(str(exc), LOCAL_WORKS) from exc
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as exc:
            # What is no JSON, or JSON of another form, fails in the libraries in many ways.
            problem = f"the sign-in provider {issuer} answers what is not understood ({type(exc).__name__})"
            raise Unavailable(problem, LOCAL_WORKS) from exc

    def _client(self, http: httpx.Client | None) -> ProviderClient:
        config = self.config
        secret = read_secret(config.client_secret_file) if config.client_secret_file else None
        return ProviderClient(
            http,
            config.client_id,
            secret,
            token_endpoint_auth_method=config.client_auth if secret else "none",
            scope=" ".join(config.scopes),
            redirect_uri=self._redirect_url,
            code_challenge_method="S256",
        )

    def _remembered(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What the provider said of itself, and its keys, if that is not old."""
        with self._lock:
            known = self._known
        if known is None or self._clock.monotonic_ns() - known[0] >= FRESH_S * 1e9:
            return None
        return known[1], known[2]

    def _provider(
        self, client: ProviderClient, *, fresh: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the provider says of itself, and its keys."""
        now_ns, known = self._clock.monotonic_ns(), None if fresh else self._remembered()
        if known is not None:
            return known
        metadata = client.ask(f"{self.config.issuer.rstrip('/')}/.well-known/openid-configuration")
        if metadata.get("issuer") != self.config.issuer:
            said = printable(str(metadata.get("issuer")), 200)
            problem = f"the provider at {self.config.issuer} names itself {said}"
            raise Unavailable(problem, "An administrator corrects issuer in [api.oidc]")
        for name in (*ENDPOINTS, *({USERINFO} & metadata.keys())):
            if urlsplit(str(metadata.get(name))).scheme != "https":
                raise Unavailable(f"the provider's {name} is no https address", LOCAL_WORKS)
        keys = client.ask(metadata["jwks_uri"])
        with self._lock:
            self._known = (now_ns, metadata, keys)
        return metadata, keys

    def _claims(self, client: ProviderClient, code: str, pending: Mapping[str, str]) -> dict[str, Any]:
        metadata, keys = self._provider(client)
        token = client.fetch_token(
            metadata["token_endpoint"],
            grant_type="authorization_code",
            code=code,
            code_verifier=pending["verifier"],
        )
        try:
            decoded = self._decoded(token["id_token"], keys)
        except InvalidKeyIdError:  # the provider has changed its keys
            _metadata, keys = self._provider(client, fresh=True)
            decoded = self._decoded(token["id_token"], keys)
        wanted = {
            "iss": {"essential": True, "value": self.config.issuer},
            "aud": {"essential": True, "value": self.config.client_id},
            "sub": {"essential": True},
        }
        given = {"nonce": pending["nonce"], "client_id": self.config.client_id}
        checked = CodeIDToken(
            decoded.claims, decoded.header, wanted, {**given, "access_token": token.get("access_token")}
        )
        checked.validate(now=self._clock.unix_us() // 1_000_000, leeway=LEEWAY_S)
        claims = dict(decoded.claims)
        if not is_complete(self.config, claims) and USERINFO in metadata:
            more = client.ask(metadata[USERINFO], as_user=True)
            if more.get("sub") != claims["sub"]:
                raise LoginRefused("the provider speaks of two different people", BEGIN_AGAIN)
            claims = {**more, **claims}
        return claims

    @staticmethod
    def _decoded(id_token: str, keys: dict[str, Any]) -> jwt.Token:
        registry = JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
        return jwt.decode(id_token, KeySet.import_key_set(keys), registry=registry)  # type: ignore[arg-type]
