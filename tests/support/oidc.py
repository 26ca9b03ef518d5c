"""A provider of OpenID Connect on loopback: the one that authlib lets one build, with TLS and PKCE.

``people`` are those whom it knows; whoever comes to its authorization endpoint is ``at_the_browser``.
``lies`` are claims that replace those of the next ID tokens, ``header`` the header of them.
"""

from __future__ import annotations

import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2 import OAuth2Error
from authlib.oauth2.rfc6749.grants import AuthorizationCodeGrant
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oidc.core import OpenIDCode
from flask import Flask, Response, jsonify, request
from joserfc.jwk import RSAKey
from werkzeug.serving import WSGIRequestHandler, make_server

from pmdaemon.pki.authority import DAY_S, Authority

CLIENT = "sla-server"
SECRET = "of-the-client-of-the-provider"


class Client:
    """The one client that the provider knows."""

    id_token_signed_response_alg = "RS256"

    def __init__(self, redirect_url: str) -> None:
        self.redirect_url = redirect_url

    def get_client_id(self) -> str:
        return CLIENT

    def get_default_redirect_uri(self) -> str:
        return self.redirect_url

    def get_allowed_scope(self, scope: str) -> str:
        return scope

    def check_redirect_uri(self, redirect_uri: str) -> bool:
        return redirect_uri == self.redirect_url

    def check_client_secret(self, client_secret: str) -> bool:
        return client_secret == SECRET

    def check_endpoint_auth_method(self, method: str, _endpoint: str) -> bool:
        return method == "client_secret_basic"

    def check_response_type(self, response_type: str) -> bool:
        return response_type == "code"

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type == "authorization_code"


@dataclass
class Code:
    """What the provider keeps of a code that it gave."""

    code: str
    user: str
    redirect_uri: str
    scope: str
    nonce: str
    code_challenge: str
    code_challenge_method: str

    def get_redirect_uri(self) -> str:
        return self.redirect_uri

    def get_scope(self) -> str:
        return self.scope

    def get_nonce(self) -> str:
        return self.nonce

    def get_auth_time(self) -> int | None:
        return None

    get_acr = get_amr = get_auth_time


class Quiet(WSGIRequestHandler):
    def log(self, *_args: Any) -> None:
        return


@cache
def first_key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": "first"})


@dataclass
class Provider:
    """See the module."""

    folder: Path
    people: dict[str, dict[str, Any]] = field(default_factory=dict)
    at_the_browser: str = ""
    lies: dict[str, Any] = field(default_factory=dict)
    key: RSAKey = field(default_factory=first_key)
    signs_with: RSAKey | None = None
    """Another key than the one it publishes."""
    asked: list[str] = field(default_factory=list)
    redirect_url: str = ""
    shows_page: bool = False
    """People have to agree on a page of the provider, as in a browser."""
    used: set[str] = field(default_factory=set)
    codes: dict[str, Code] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    issuer: str = ""

    def __post_init__(self) -> None:
        authority = Authority(self.folder / "provider-ca", DAY_S)
        authority.init()
        self.ca = self.folder / "provider-ca" / "ca.crt"
        key, certificate = authority.nbd_credential("provider", ["127.0.0.1"], DAY_S)
        pem = self.folder / "provider.pem"
        pem.touch(0o600)
        pem.write_bytes(certificate + key)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pem)
        self.secret_file = self.folder / "client.secret"
        self.secret_file.touch(0o600)
        self.secret_file.write_text(SECRET + "\n")
        self.server = make_server(
            "127.0.0.1", 0, self._app(), threaded=True, ssl_context=tls, request_handler=Quiet
        )
        self.issuer = f"https://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(60)

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of the server, ``[api.oidc]``."""
        made = {"issuer": self.issuer, "client_id": CLIENT, "client_secret_file": self.secret_file}
        rows = [
            {"value": "storage", "role": "operator"},
            {"claim": "tenant", "value": "acme", "role": "viewer", "labels": "customer=acme"},
        ]
        return {**made, "ca_file": self.ca, "title": "Example ID", "map": rows, **more}

    def _app(self) -> Flask:
        app = Flask("provider")
        server = AuthorizationServer(app, lambda _name: Client(self.redirect_url), self._save_token)
        server.register_grant(self._grant(), [self._tokens(), CodeChallenge(required=True)])

        @app.before_request
        def count() -> None:
            self.asked.append(request.path)

        @app.get("/.well-known/openid-configuration")
        def metadata() -> Response:
            ends = {"authorization": "authorize", "token": "token", "userinfo": "userinfo"}
            found = {f"{name}_endpoint": f"{self.issuer}/{path}" for name, path in ends.items()}
            return jsonify({"issuer": self.issuer, "jwks_uri": f"{self.issuer}/jwks", **found})

        @app.get("/jwks")
        def jwks() -> Response:
            return jsonify({"keys": [self.key.as_dict(private=False)]})

        @app.get("/authorize")
        def authorize() -> Any:
            try:
                grant = server.get_consent_grant(end_user=self.at_the_browser)
            except OAuth2Error as exc:
                return Response(f"{exc.error}: {exc.description}", 400)
            assert request.args["code_challenge_method"] == "S256"
            if self.shows_page and "agreed" not in request.args:
                return f'<a id="agree" href="{escape(request.full_path)}&agreed=1">Agree</a>'
            return server.create_authorization_response(grant=grant, grant_user=self.at_the_browser)

        @app.post("/token")
        def token() -> Any:
            return server.create_token_response()

        @app.get("/userinfo")
        def userinfo() -> Response:
            who = self.tokens[request.headers["Authorization"].removeprefix("Bearer ")]
            return jsonify({"sub": who, **self.people[who].get("userinfo", {})})

        return app

    def _save_token(self, token: dict[str, Any], asked: Any) -> None:
        self.tokens[token["access_token"]] = asked.user

    def _grant(self) -> type[AuthorizationCodeGrant]:
        provider = self

        class Grant(AuthorizationCodeGrant):  # type: ignore[misc]
            TOKEN_ENDPOINT_AUTH_METHODS = ["client_secret_basic"]  # noqa: RUF012

            def save_authorization_code(self, code: str, asked: Any) -> None:
                data = asked.payload.data
                provider.used.add(data["nonce"])
                provider.codes[code] = Code(
                    code,
                    asked.user,
                    asked.payload.redirect_uri,
                    asked.payload.scope,
                    data["nonce"],
                    data["code_challenge"],
                    data["code_challenge_method"],
                )

            def query_authorization_code(self, code: str, _client: Client) -> Code | None:
                return provider.codes.get(code)

            def delete_authorization_code(self, code: Code) -> None:
                del provider.codes[code.code]

            def authenticate_user(self, code: Code) -> str:
                return code.user

        return Grant

    def _tokens(self) -> OpenIDCode:
        provider = self

        class Tokens(OpenIDCode):  # type: ignore[misc]
            def exists_nonce(self, nonce: str, _asked: Any) -> bool:
                return nonce in provider.used

            def resolve_client_private_key(self, _client: Client) -> RSAKey:
                return provider.signs_with or provider.key

            def get_encode_header(self, _client: Client) -> dict[str, str]:
                key = provider.signs_with or provider.key
                return {"alg": "RS256", "kid": str(key.kid)}

            def get_client_claims(self, _client: Client) -> dict[str, Any]:
                return {"iss": provider.issuer}

            def generate_user_info(self, user: str, _scope: str) -> dict[str, Any]:
                claims = {key: value for key, value in provider.people[user].items() if key != "userinfo"}
                return {"sub": user, **claims, **provider.lies}

        return Tokens(require_nonce=True)


@contextmanager
def running(folder: Path) -> Iterator[Provider]:
    """A provider, until the end."""
    made = Provider(folder)
    try:
        yield made
    finally:
        made.close()


def other_key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": secrets.token_hex(4)})
