"""TenantLabels: which tenants have metrics of their own.

Owns that choice. A tenant comes as a label that reveals nothing about its salt.
"""

from router.caller import DEFAULT_TENANT

OTHER_TENANTS = "other"


class TenantLabels:
    """The default tenant and the first others, `most` in all, keep their labels; later ones share one.

    A label is never given to another tenant: a counter that returns to zero, or ends, looks like an outage.
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
