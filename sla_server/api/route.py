"""What the table of routes is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sla_server.api.roles import Role

PREFIX: Final = "/api/v1"


@dataclass(frozen=True, slots=True)
class Query:
    """One parameter of the query string."""

    name: str
    kind: str
    """integer, string or boolean."""
    about: str
    required: bool = False
    least: int | None = None
    """Smallest integer."""
    most: int | None = None
    """Largest integer."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method of one path."""

    method: str
    path: str
    """Below PREFIX, parameters in braces."""
    operation: str
    about: str
    query: tuple[Query, ...] = ()
    body: str = ""
    """Name of the body's schema in ``openapi.SCHEMAS``; empty: none."""
    answer: str = "application/json"
    schema: str = ""
    """Name of the answer's schema in ``openapi.SCHEMAS``; empty: any object."""
    items: str = ""
    """Of a list: the table whose rows it has, or ``ANY``; empty: the answer is no list."""
    also: tuple[int, ...] = ()
    """Statuses besides 200 that come with the same answer, not with a problem."""
    empty: bool = False
    """Whether 204 is an answer."""
    changes: bool = False
    role: str = ""
    """The least role it needs; empty: operator to change, viewer to read."""
    public: bool = False
    """Whether it answers those who are not signed in even where reading needs it."""

    personal: bool = False
    """Whether it needs a login even where reading is open."""

    scope: str = ""
    """What accounts with labels get of it (``scope.LabelScope``); empty: nothing."""

    @property
    def needs(self) -> Role:
        """The least role of those who may ask."""
        return Role[self.role or ("operator" if self.changes else "viewer")]

    @property
    def rule(self) -> str:
        """The path in Flask's spelling."""
        return PREFIX + self.path.replace("{", "<").replace("}", ">")

    @property
    def parameters(self) -> list[str]:
        """Names within braces."""
        return [part.partition("}")[0] for part in self.path.split("{")[1:]]


LIMIT_MAX: Final = 1000
ANY: Final = "any"
LIMIT = Query("limit", "integer", "Rows a page; default 100.", least=1, most=LIMIT_MAX)
