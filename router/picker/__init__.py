"""The router as a gateway's endpoint picker, over Envoy's external processing (gRPC).

Promises that each prompt is decided, reserved and explained as one of the router's own HTTP port is, and that
the gateway is told which server to send it to. What servers answer is read and passes unchanged. Nothing is
submitted, retried, resumed or continued from its tokens here. Loaded only if `picker_port` is set.
"""
