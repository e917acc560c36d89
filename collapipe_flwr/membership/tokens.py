"""Join tokens: what a board is given once, and the book in which the control unit keeps them.

    greenhouse@10.0.0.10:50060/BASE64            of a device
    greenhouse@10.0.0.10:50060/edge/BASE64       of another role

A token holds the cluster, the address of its joining service, the SHA-256 of the CA's certificate
and a secret of 128 random bits. The book has the secret's SHA-256 only, with the role, the validity
and the uses of the token.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from collapipe_flwr.config.cluster_file import Role
from collapipe_flwr.core.durable import write_private
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.links import is_address

SECRET_BYTES, _PIN_BYTES = 16, 32
_FORM = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})@([^/]+:[0-9]{1,5})(?:/([a-z-]+))?/([A-Za-z0-9_-]{64})"
)
_ROLES = {role.word: role for role in Role if role is not Role.REGISTRAR}
_CLOCK_S = 60.0  # by which a clock may be put back
_KEPT_S = 7 * 86400.0  # to tell an expired token from one that never was


class JoinRefused(LinkError):
    """A machine is not admitted; the sentence says why, and holds no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """``pin`` is the SHA-256 of the CA's certificate, by which the joining service is verified.

    ``role`` is what the bearer expects; the role in the book counts.
    """

    cluster_id: str
    address: str
    pin: bytes
    secret: bytes = field(repr=False)
    role: Role = Role.DEVICE

    def __str__(self) -> str:
        packed = base64.urlsafe_b64encode(self.pin + self.secret).decode()
        role = "" if self.role is Role.DEVICE else f"/{self.role.word}"
        return f"{self.cluster_id}@{self.address}{role}/{packed}"


def parse_token(text: str) -> JoinToken:
    """Read what `collapipe cluster token` printed; raises ConfigError, without the secret."""
    found = _FORM.fullmatch(text.strip())
    role = _ROLES.get((found and found[3]) or Role.DEVICE.word)
    if found is None or role is None or not is_address(found[2]):
        raise ConfigError(
            "this is not a join token, which reads like NAME@HOST:PORT/ and 64 characters: copy "
            "the whole line that `collapipe cluster token` printed"
        )
    packed = base64.urlsafe_b64decode(found[4])  # its form makes it 48 bytes
    return JoinToken(
        cluster_id=found[1],
        address=found[2],
        pin=packed[:_PIN_BYTES],
        secret=packed[_PIN_BYTES:],
        role=role,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUse:
    """A member that joined by a token: its name, and the SHA-256 of its public key."""

    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownToken:
    """One token in the book; times are Unix seconds of the control unit's clock."""

    digest: str  # SHA-256 of the secret
    cluster_id: str
    role: Role
    members: int  # that may join by it
    made_s: float
    ends_s: float
    uses: tuple[TokenUse, ...] = ()


class TokenBook:
    """The tokens of a folder, in a file that only its owner can read.

    Callers that change it hold the folder's lock. Raises ConfigError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, token: JoinToken, members: int, *, now_s: float, valid_s: float) -> None:
        """Add a new token; only the digest of its secret is written."""
        known = [t for t in self._read() if now_s - t.ends_s < _KEPT_S]
        made = KnownToken(
            digest=sha256(token.secret).hexdigest(),
            cluster_id=token.cluster_id,
            role=token.role,
            members=members,
            made_s=now_s,
            ends_s=now_s + valid_s,
        )
        self._write((*known, made))

    def find_usable(self, secret: bytes, use: TokenUse, now_s: float) -> KnownToken:
        """Find the token by which a member may join; the same member may do so again.

        Raises JoinRefused when it is not known, not valid now, or used up.
        """
        digest = sha256(secret).hexdigest()
        self.void_expired(now_s)
        # Every token is compared, each in constant time.
        found = [token for token in self._read() if hmac.compare_digest(token.digest, digest)]
        if not found:
            raise JoinRefused("the token is not known: copy it again, or print another one")
        _check(found[0], use, now_s)
        return found[0]

    def has_expired(self, now_s: float) -> bool:
        """Return whether there are tokens to `void_expired`."""
        return any(_has_ended(token, now_s) for token in self._read())

    def void_expired(self, now_s: float) -> None:
        """Mark the tokens whose time is over, so that a clock put back does not revive them."""
        known = self._read()
        after = [replace(t, ends_s=t.made_s) if _has_ended(t, now_s) else t for t in known]
        if after != known:
            self._write(after)

    def redeem(self, token: KnownToken, use: TokenUse) -> None:
        """Record that a member joins by a token from `find_usable`."""
        used = replace(token, uses=tuple(dict.fromkeys((*token.uses, use))))
        if used != token:
            self._write([used if each == token else each for each in self._read()])

    def revoke(self, name: str) -> None:
        """Void a member's use of a token, so that it cannot join again; the use stays counted."""
        known = self._read()
        void = TokenUse(name=name, key="")
        after = [
            replace(t, uses=tuple(void if use.name == name else use for use in t.uses))
            for t in known
        ]
        if after != known:
            self._write(after)

    def _read(self) -> list[KnownToken]:
        if not self._path.exists():
            return []
        try:
            text = self._path.read_text()
            return list(from_json(tuple[KnownToken, ...], text, self._path.name))
        except (OSError, UnicodeDecodeError, LinkError) as error:
            raise ConfigError(
                f"{self._path} cannot be used ({error}): delete it, which makes all tokens "
                "worthless, and print new ones with `collapipe cluster token`"
            ) from error

    def _write(self, tokens: Sequence[KnownToken]) -> None:
        write_private(self._path, to_json(tuple(tokens)).encode())


def _has_ended(token: KnownToken, now_s: float) -> bool:
    """Return whether its time is over and not marked as such yet."""
    return token.made_s < token.ends_s <= now_s


def _check(token: KnownToken, use: TokenUse, now_s: float) -> None:
    if now_s >= token.ends_s or token.ends_s <= token.made_s:
        raise JoinRefused("the token has expired: print another one with `collapipe cluster token`")
    if now_s < token.made_s - _CLOCK_S:
        raise JoinRefused(
            "the control unit's clock was put back since the token was made: set it "
            "(`timedatectl`) and print another token"
        )
    if use in token.uses:
        return
    if any(use.name.casefold() == before.name.casefold() for before in token.uses):
        raise JoinRefused(f"the token was used by {use.name} already: it works once per member")
    if len(token.uses) >= token.members:
        raise JoinRefused(
            f"the token is used up (it was made for {token.members}): print another one with "
            "`collapipe cluster token`"
        )
