"""Who may ask, from where, and how many at once. Must not know: what is asked, the runner."""

import hmac

from werkzeug.datastructures import Headers

from container.settings import Settings
from container.web import errors

_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
_EXPOSED = "X-Request-Id, X-Compute-Type, X-Compute-Time, X-Total-Time, X-Generated-Tokens"


class Permits:
    """Places for sequences in this worker, so that an overload costs no work.

    The limit is for the whole instance. The kernel decides which worker accepts a connection, so a
    worker may have to carry all of it; the runner, which sees every worker's sequences, holds the
    exact count.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0

    def take(self, num: int = 1) -> None:
        """Raises ApiError 429 when there are not that many left."""
        if self.num_taken + num > self.limit:
            raise errors.overloaded()
        self.num_taken += num

    def give_back(self, num: int) -> None:
        """Free places taken before."""
        self.num_taken -= num


class Guard:
    """The checks that come before any work."""

    def __init__(self, settings: Settings) -> None:
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._origins = frozenset(settings.cors_allow_origin)
        self.permits = Permits(settings.max_concurrent_requests)

    def check_key(self, authorization: str | None) -> None:
        """Raises ApiError 401 unless the header is `Bearer KEY` (the scheme in any case)."""
        if self._key is None:
            return
        scheme, _, given = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise errors.unauthorized("This server needs an API key: `Authorization: Bearer KEY`.")
        if not hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key):
            raise errors.unauthorized("The API key is wrong.")

    def cors_headers(self, origin: str | None) -> Headers:
        """Headers for any answer: `*`, or the origin if it is one of those allowed."""
        headers = Headers()
        if "*" in self._origins:
            headers["Access-Control-Allow-Origin"] = "*"
        elif origin in self._origins:
            headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Expose-Headers"] = _EXPOSED
        headers["Vary"] = _VARY
        return headers

    def preflight_headers(self, requested: str | None) -> Headers:
        """What a browser asks before the real request; it cannot send a key with it."""
        headers = Headers()
        headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        headers["Access-Control-Allow-Headers"] = requested or "Authorization, Content-Type"
        headers["Access-Control-Max-Age"] = "600"
        return headers
