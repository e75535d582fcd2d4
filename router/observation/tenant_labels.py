"""TenantLabels: which tenants have metrics of their own.

Owns that choice. A tenant comes as a label that tells nothing about its salt.
"""

from router.caller import DEFAULT_TENANT

OTHER_TENANTS = "other"


class TenantLabels:
    """The default tenant and the first others, `most` in all, keep their labels; who comes later shares one.

    A place is never given to another tenant: a counter that goes back to zero, or that ends, is an
    outage to those who read it.
    """

    def __init__(self, most: int) -> None:
        self._num_left = most - 1
        self._labels = {DEFAULT_TENANT: DEFAULT_TENANT}

    def of(self, tenant: str) -> str:
        label = self._labels.get(tenant)
        if label is None:
            if self._num_left == 0:
                return OTHER_TENANTS
            self._num_left -= 1
            label = self._labels[tenant] = tenant
        return label
