"""What a submit says of its tenant, and what of that is not believed."""

import math

import msgspec
import pytest

from replicas.protocol.frames import Submit
from replicas.protocol.wire import encode_submit
from tests.replicas.builders import engine_request


def submit(**fields: object) -> Submit:
    return msgspec.structs.replace(engine_request([1, 2]).submit, **fields)


def test_tenant_and_shares_travel() -> None:
    sent = submit(tenant=b"12345678", lease_share=0.25, store_share=1.0)
    assert msgspec.msgpack.decode(encode_submit(sent), type=Submit) == sent


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": bytes(17)},
        {"lease_share": 1.01},
        {"store_share": -0.01},
        {"store_share": math.nan},
        {"lease_share": math.inf},
    ],
)
def test_nonsense_is_refused_where_it_is_decoded(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(submit(**fields)), type=Submit)
