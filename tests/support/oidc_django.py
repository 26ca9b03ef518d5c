"""A provider of OpenID Connect that shares no code with ours: Django OAuth Toolkit (oauthlib, jwcrypto).

``python -m tests.support.oidc_django FOLDER REDIRECT_URL`` in a process of its own, for Django has one
configuration a process. FOLDER has ``provider.pem`` (certificate and key of its TLS) and ``people.json``:
name to claims. It prints its issuer once it listens. Whoever comes is signed in there as the person that
``at_the_browser`` names; the rest (code flow, PKCE, keys, ID token, userinfo) is the toolkit's.
"""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT = "sla-server"
SECRET = "of-the-client-of-the-toolkit"
PATH = "/o"


def configure(folder: Path, issuer: str) -> None:
    """Django's settings, as its manual has them."""
    from django.conf import settings

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()
    settings.configure(
        SECRET_KEY="of-this-test",  # on loopback, gone with the test
        ALLOWED_HOSTS=["127.0.0.1"],
        ROOT_URLCONF=__name__,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "provider.db"}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        LOGGING_CONFIG=None,
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "oauth2_provider",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            f"{__name__}.signed_in",
        ],
        PEOPLE=folder,
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True,
            "OIDC_RSA_PRIVATE_KEY": pem,
            "OIDC_ISS_ENDPOINT": issuer,
            "PKCE_REQUIRED": True,
            "SCOPES": {"openid": "who it is", "profile": "name", "email": "mail", "groups": "groups"},
            "OAUTH2_VALIDATOR_CLASS": f"{__name__}.Claims",
        },
    )


def claims_of(name: str) -> dict[str, Any]:
    from django.conf import settings

    found: dict[str, Any] = json.loads((settings.PEOPLE / "people.json").read_text())[name]
    return found


def signed_in(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Middleware in place of a form that asks for a password."""
    from django.conf import settings

    def handle(request: Any) -> Any:
        from django.contrib.auth import get_user_model

        name = (settings.PEOPLE / "at_the_browser").read_text()
        request.user = get_user_model().objects.get_or_create(username=name)[0]
        return answer(request)

    return handle


def __getattr__(name: str) -> Any:
    """What Django looks for by name here, and what needs its settings to exist."""
    if name == "urlpatterns":
        from django.urls import include, path

        return [path("o/", include("oauth2_provider.urls", namespace="oauth2_provider"))]
    if name == "Claims":
        from oauth2_provider.oauth2_validators import OAuth2Validator

        class Claims(OAuth2Validator):  # type: ignore[misc]
            oidc_claim_scope = None

            def get_additional_claims(self, request: Any) -> dict[str, Any]:
                return claims_of(request.user.username)

        return Claims
    raise AttributeError(name)


def main() -> None:
    folder, redirect_url = Path(sys.argv[1]), sys.argv[2]
    from werkzeug.serving import make_server

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "provider.pem")
    application: list[Any] = []  # made below: its issuer has the port

    def answer(environ: Any, start: Any) -> Any:
        return application[0](environ, start)

    server = make_server("127.0.0.1", 0, answer, threaded=True, ssl_context=tls)
    issuer = f"https://127.0.0.1:{server.server_port}{PATH}"
    configure(folder, issuer)
    import django

    django.setup()
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application
    from oauth2_provider.models import get_application_model

    call_command("migrate", verbosity=0)
    get_application_model().objects.create(
        name="storage SLA",
        client_id=CLIENT,
        client_secret=SECRET,
        client_type="confidential",
        authorization_grant_type="authorization-code",
        redirect_uris=redirect_url,
        algorithm="RS256",
        skip_authorization=True,
    )
    application.append(get_wsgi_application())
    print(issuer, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    from tests.support import oidc_django

    oidc_django.main()
