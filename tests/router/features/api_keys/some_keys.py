"""Keys of a few tenants, as tests ask with them."""

from router.caller import Caller, Right, Tenant
from router.features.api_keys.keyring import HeldKey, Keyring, key_digest

ACME, BETA, GAMMA, OPERATOR, OLD = (f"sk-kvasir-{digit * 12}-{digit * 43}" for digit in "12345")
"""Acme and Beta share nothing, Gamma and Beta the group `lab`; the operator's has every right; the last one
has expired."""

ACME_TENANT = Tenant(name="acme")
BETA_TENANT = Tenant(name="beta", groups=("lab",))
GAMMA_TENANT = Tenant(name="gamma", groups=("lab", "attic"))


def some_keys() -> Keyring:
    callers = {
        ACME: Caller(tenant=ACME_TENANT, key_id="1" * 12),
        BETA: Caller(tenant=BETA_TENANT, key_id="2" * 12, group="lab"),
        GAMMA: Caller(tenant=GAMMA_TENANT, key_id="3" * 12, group="lab"),
        OPERATOR: Caller(tenant=Tenant(name="ops"), key_id="4" * 12, rights=frozenset({Right.ADMIN})),
        OLD: Caller(tenant=ACME_TENANT, key_id="5" * 12),
    }
    return Keyring(
        {
            str(caller.key_id): HeldKey(key_digest(key), caller, expires=1.0 if key == OLD else None)
            for key, caller in callers.items()
        }
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
