"""Bodies about accounts: keys, usage, the audit log, and the search for sessions."""

from tinker_gmi.wire_model import WireModel


class NamedDetails(WireModel):
    name: str


class UserDetails(WireModel):
    email: str


class ApiKeyDetails(WireModel):
    org_details: NamedDetails
    user_details: UserDetails


class ApiKeyMeResponse(WireModel):
    key_id: int
    name: str
    note: str
    details: ApiKeyDetails
