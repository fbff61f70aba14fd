"""Who may make this server run code, train or write: the page opened by the address that `heedful serve` printed.

That address has a secret made at the start, as Jupyter's has. The page sends it as a header (`x-heedful-token`), not as
a cookie, which browsers send to every port of a machine. A request that says it was forwarded is refused whatever it
has; a proxy that does not say so cannot know the secret.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request as HttpRequest

from heedful.serve.errors import ApiError
from heedful.serve.middleware import host_name, is_loopback
from heedful.serve.options import Options

TOKEN_HEADER = "x-heedful-token"
FORWARDING = frozenset(
    {
        *("forwarded", "via", "cdn-loop", "client-ip", "proxy-connection", "true-client-ip", "wl-proxy-client-ip"),
        *("x-client-ip", "x-cluster-client-ip", "x-host", "x-proxyuser-ip", "x-real-ip", "x-remote-addr", "x-scheme"),
    }
)
FORWARDING_PREFIXES = (
    "cf-",
    "fastly-",
    "fly-",
    "x-amzn-",
    "x-arr-",
    "x-azure-",
    "x-envoy-",
    "x-forward",
    "x-original-",
)


def refuse(http: HttpRequest, *, others: bool) -> ApiError | None:
    """Why a request may not run code, train or write; None if it may. `others`: from other machines too."""
    names = [name.decode("latin-1").lower() for name, _ in http.scope["headers"]]
    if forwarding := [name for name in names if name in FORWARDING or name.startswith(FORWARDING_PREFIXES)]:
        return ApiError(
            403,
            f"this request came through a proxy ({forwarding[0][:50]}): code and training are for this machine; open "
            "the address that `heedful serve` printed there",
            code="forwarded",
        )
    host = host_name(http.headers.get("host", ""))
    if not others and host and not is_loopback(host):
        return ApiError(
            403,
            "code and training are for this machine: open the address that `heedful serve` printed there",
            code="not_local",
        )
    options: Options = http.app.state.options
    sent = http.headers.get(TOKEN_HEADER, "").encode("latin-1")
    if not hmac.compare_digest(sent, options.token.encode("ascii")):
        return ApiError(
            403,
            "this page was opened without the server's token: open the address that `heedful serve` printed, which "
            "ends with ?token=... (in a program, send it as the header X-Heedful-Token)",
            code="token_required",
        )
    return None
