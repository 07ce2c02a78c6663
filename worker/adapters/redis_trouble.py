"""What went wrong between a client and Redis, in a sentence that says what to check and holds neither address nor
password: the client's own do hold the address."""

from __future__ import annotations

import errno
import ssl

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

REFUSED = "The cache refused the user or password in ROUTER_REDIS_URL"
NOT_PERMITTED = (
    "The cache does not permit its user a command that is needed: docs/deploying.md lists what the user in "
    "ROUTER_REDIS_URL must be allowed"
)
NOT_BELIEVED = (
    "The cache's certificate is not accepted: check ssl_ca_certs in ROUTER_REDIS_URL, and that the certificate names "
    "the address"
)
NO_TLS = "The cache speaks no TLS there: ROUTER_REDIS_URL must begin with redis:// for a port without"
NO_FILE = "A file that ROUTER_REDIS_URL names cannot be read: check ssl_ca_certs, and ssl_certfile and ssl_keyfile"
NO_PEM = (
    "A file that ROUTER_REDIS_URL names cannot be used, since it is no PEM file of its kind: check ssl_ca_certs, and "
    "ssl_certfile and ssl_keyfile"
)
HANGS_UP = "The cache hangs up: ROUTER_REDIS_URL must begin with rediss:// for a port with TLS"
CLUSTER = "The cache is a Redis Cluster, whose nodes refuse keys of one batch: use one server, or its replicas"


def sentence(error: Exception, timeout_s: float) -> str:
    """Checked with redis-py 8.1, which raises its own errors `from None`: the cause is their context."""
    if isinstance(error, ResponseError) and str(error).startswith(("CROSSSLOT", "MOVED")):
        return CLUSTER
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return f"The cache gave no answer within {timeout_s * 1000:.0f} ms"
    if isinstance(error, AuthenticationError):
        return REFUSED
    if _is_forbidden(error):
        return NOT_PERMITTED
    match error.__context__ if isinstance(error, RedisConnectionError) else None:
        case ssl.SSLCertVerificationError():
            return NOT_BELIEVED
        case ssl.SSLError() as refused:
            # Before anything is sent, OpenSSL 3 reads the files; for one of these mistakes ssl has no constant.
            return NO_PEM if refused.library in ("PEM", "X509") or "PEM lib" in str(refused) else NO_TLS
        case FileNotFoundError() | PermissionError() | IsADirectoryError() | NotADirectoryError():
            return NO_FILE
        case OSError(errno=errno.ELOOP | errno.ENAMETOOLONG):
            return NO_FILE
        case ConnectionResetError():
            return HANGS_UP
    return f"The cache cannot be used ({type(error).__name__})"


def is_refusal(error: Exception) -> bool:
    """Whether another attempt cannot end otherwise before somebody acts."""
    if isinstance(error, AuthenticationError) or _is_forbidden(error):
        return True
    return isinstance(error, RedisConnectionError) and isinstance(error.__context__, ssl.SSLCertVerificationError)


def _is_forbidden(error: Exception) -> bool:
    """What a script may not call has no error of its own (Redis 7.0, Valkey 9.1)."""
    in_script = ("ACL failure in script", "The user executing the script can't run")
    return isinstance(error, NoPermissionError) or (
        isinstance(error, ResponseError) and str(error).startswith(in_script)
    )
