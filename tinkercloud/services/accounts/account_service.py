"""Who a caller is: tokens, and what a key says of itself."""

from tinker_gmi.types import ApiKeyDetails, ApiKeyMeResponse, NamedDetails, UserDetails
from tinkercloud.errors import Forbidden
from tinkercloud.storage.keys import KeyRecord, KeyStore

ORGANIZATION = "tinkercloud"  # a self-hosted server is one organization
CONSOLE_USE = "console"  # of tokens in cookies
LOGIN_KEY_PREFIX = "tinker-cli-"  # how the command line names the key of a machine


def user_urn(user: str) -> str:
    return f"tml:organization_user:{user}"


def user_of_urn(urn: str) -> str:
    """The user of a URN; a plain name is its own."""
    return urn.removeprefix("tml:organization_user:")


class AccountService:
    def __init__(self, keys: KeyStore):
        self._keys = keys

    def token(self, user: str, credential: str) -> str:
        """A token for the key that was shown. Claims: those that `whoami` of the official client
        reads (wire specification, section 1)."""
        key = self._keys.identify(credential)
        email = user if "@" in user else ""  # clients show no address for an empty one
        claims = {"sub": user_urn(user), "org_id": ORGANIZATION, "email": email}
        return self._keys.token("" if key is None else key.key_id, claims)

    def console_token(self, key_id: str) -> str:
        """For a browser's cookie; the API does not take it as a key."""
        return self._keys.token(key_id, {"use": CONSOLE_USE})

    def describe_key(self, user: str, credential: str) -> ApiKeyMeResponse:
        key = self._keys.identify(credential)
        if key is None:  # a server without authentication takes any text for a key
            name = note = "this server asks for no key"
            return ApiKeyMeResponse(key_id=0, name=name, note=note, details=_details(user))
        return ApiKeyMeResponse(
            key_id=key.number, name=key.name or key.key_id, note=key.note, details=_details(user)
        )

    def revoke_key(self, credential: str) -> None:
        """Revoke the key that was shown, where it was made for the login of one machine; others may
        be in use elsewhere. Raises Forbidden."""
        key = self._keys.identify(credential)
        if key is None or not _is_login_key(key):
            raise Forbidden(
                f"only a key whose name begins with {LOGIN_KEY_PREFIX!r} can revoke itself; the "
                "operator of this server revokes others with `tinkercloud keys revoke`"
            )
        self._keys.revoke(key.key_id, actor=key.user)


def _is_login_key(key: KeyRecord) -> bool:
    return key.name.startswith(LOGIN_KEY_PREFIX)


def _details(user: str) -> ApiKeyDetails:
    return ApiKeyDetails(
        org_details=NamedDetails(name=ORGANIZATION), user_details=UserDetails(email=user)
    )
